"""A request between its arrival and its placement: it goes now, waits, or is refused.

A worker gets only as much work ahead as keeps it busy (`capacity`). The rest waits in `admission_queue`, in the order
of `fair_queue`, and is decided anew when its turn comes. A request whose first token would come too late is refused at
once; `measures` tells how often that was wrong.
"""
