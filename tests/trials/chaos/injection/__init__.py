"""Faults at named points inside the product's processes: a process that kills or freezes itself, a link that goes bad.

    plan        what a fault is: pure
    points      which faults make sense where: pure
    injector    counts how often points are reached, and lets the armed fault happen
    links       proxies around a process's connections, whose traffic can be corrupted
    product     where the injector takes hold of the product, which knows of `base.fault_points` alone
    faulty_files  segment files on a disk that is slow, full or broken
    disk_notes  such a disk under processes that run, as a file says
    control     how faults are armed in a process that runs
    process     starts a module of the product as a process that can be broken

docs/fault-injection.md says what each fault does.
"""
