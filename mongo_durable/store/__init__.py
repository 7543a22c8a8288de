"""MongoDB. The only layer that imports a driver; no driver exception leaves it.

- `connection`: one client per event loop, PyMongo's or Motor's; transactions with explicit options.
- `schema`: every collection, index, validator and view; `documents`: what stands in them.
- `appender`: group commit of activity events (the fence); `events`: reading a history.
- `heads`, `runs`, `claims`, `frontiers`: changes of a run's state, the head first, the event last.
- `payloads`: the way of every value into its document and back: encrypted (`sealing`), and cut where it is too large; `wakeups`: the change stream.
- `roles`: who may do what; `diagnosis`: what of a deployment needs attention.
- `faults`: driver errors become ours; `failpoints`: where tests break things.

Lock order: `runs`, then `frontiers`, `resolutions`, `threads`, `thread_states`, `activity_events`. All are of one run; nothing is shared between runs
but a thread's head, and runs of one thread follow one another.
"""
