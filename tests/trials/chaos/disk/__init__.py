"""`python -m tests.trials.chaos.disk`: the disk of a cluster's workers is broken under chats, and no answer may differ.

    options     the flags, checked once
    chats       what clients say, turn by turn, and what they got
    damage      what is done to segment files of workers that are dead: pure but for the files
    bed         a cluster without Ray whose disks can be slow, full or broken while it runs
    faults      one entry for each fault: what is tried, and what was seen of it
    session     one cluster after the other, and the table of docs/faults.md

`make faults` runs it, after the matrix.
"""
