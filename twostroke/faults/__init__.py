"""Faults at named points of the protocol, for tests: a process that kills or freezes itself, a link that goes bad.

Off unless the process was started with TWOSTROKE_FAULT: "control" lets faults be armed by rpc (rpc.faults), anything
else is a fault itself, "point:kind:count" with an optional ":seconds" (see `plan`).

    plan        what a fault is: pure
    points      which faults make sense where: pure
    injector    counts how often points are reached, and lets the armed fault happen
    links       proxies around this process's connections, whose traffic can be spoilt
"""

from twostroke.faults.injector import announced, carried, dialled, hang_up, install, is_off, links, reach

__all__ = ["announced", "carried", "dialled", "hang_up", "install", "is_off", "links", "reach"]
