"""The protocol: pure functions and values, standard library only. No I/O, no clock, no randomness.

On one page:

- `identity`: a `Position` is where an effect stands in the structure of a run; its `activity_id` derives from run and position.
- `events`: the facts of a run, numbered densely from 1 (`seq`), each under the fence of the attempt that wrote it.
- `history`: the fold of the events; it refuses a history that no correct writer could have written.
- `frontier`: the set of activities that suspended together, in position order, with the digest that a reviewer pins.
- `replay`: what to do when the code reaches an effect, a rest, the end of a step or the end, given the history.
- `values`, `canonical`: application values as plain trees that BSON holds exactly, and their digests.

Life of a run (each arrow is one transaction or one compare-and-set on its head, and one event):

    pending ──claim──> running ──suspend──> suspended ──resolve / expire──> ready ──claim──> running ──end──> completed
                          │                     └──cancel──> cancelled                          ├──> failed ──retry──> ready
                          └── a dead owner's run is claimed again, under the next fence         ├──> diverged ──retry──> ready
                                                                                                └──> cancelled
"""
