"""`python -m tests.trials.chaos.faults`: a cluster is broken in every way, and no client may notice.

    options         the flags, checked once
    trials          which faults, in which order: pure
    load            what clients ask meanwhile: pure
    client          clients that go on at the other router
    answer          what they got, and what is wrong with it: pure
    testbed         the cluster: a `twostroke serve` of our own
    triggers        what has to happen for some points to be reached
    pins            pins that are put and removed meanwhile, and whether all processes agree on them
    head            Ray's head, killed or frozen, and started again
    zombies         streams that go on elsewhere when what was frozen comes back
    leak_check      whether anything is left of requests that are over
    run             one fault after the other
    outcome         what came of one
    bounds          how long clients may wait: pure
    session         clusters one after the other, progress, JSON
    report          the tables of docs/faults.md: pure

`make faults` runs it, on paced models and on a real one.
"""
