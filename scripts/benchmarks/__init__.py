"""Measures mongo_durable beside the bare database and beside its peers, in one run: `scripts/bench`.

    workloads     what is measured: for each workload who takes part, with which parameters, and which ratio is wanted
    contenders/   who takes part; each runs in a process of its own
    worker, crew  such a process, and the hold that its parent has on it
    servers       the MongoDB and the PostgreSQL that they work on, thrown away afterwards
    measuring     rounds in which the contenders take turns, in random order; only one works at a time
    report        medians, spreads and ratios as a table, Markdown or JSON

Absolute numbers say more about the machine than about the code. What counts are the ratios, because both sides of one were measured in turns, within
seconds of each other, on the same disk.
"""
