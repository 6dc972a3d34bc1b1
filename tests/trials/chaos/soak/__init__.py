"""`python -m tests.trials.chaos.soak`: random faults under mixed load; what is lost, left or grows is named.

    options     the flags, checked once
    memory      how much the processes hold, over time: pure
    session     load and faults until the time is over; a line a minute
    report      the section of docs/faults.md: pure

Cluster, clients, faults and checks are those of `tests.trials.chaos.faults`.
"""
