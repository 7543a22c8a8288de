"""One attempt at a run, and what the attempts of a process share.

- `attempt`: start an activity, record its outcome, seal a step, suspend, end; the verdict that ends an attempt is remembered.
- `policy`: activity retries, and what to do when nobody knows whether an effect happened.
- `process`: identity, lease, heartbeat, appender and change stream of this process.

The engine knows nothing of LangGraph. It is async, on one event loop.
"""
