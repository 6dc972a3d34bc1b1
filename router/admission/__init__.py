"""Admission of a request: it goes to its worker now, waits in the queue, or is refused.

A worker gets only as much work ahead as keeps it busy (`capacity`). Other requests wait in `admission_queue`, in the
order of `fair_queue`, and are routed again when their turn comes. A request whose first token would come too late is
refused at once; `measures` counts how often that was wrong.
"""
