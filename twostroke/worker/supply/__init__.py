"""Suppliers bring the missing parts of an admitted sequence, so that the scheduler need not compute them.

A supplier can write parts of blocks: the host memory or the disk of this worker, a page source, a peer. The suppliers
of a sequence have an order. Each one takes what it brings sooner than those after it, and hands on what it does not
bring in the end. The scheduler computes what no supplier takes: it computes every arriving page without a writer.

supply     the port of suppliers; the suppliers of one sequence, and how their pulls ended
remote     page sources and peers as suppliers: each begins a pull
pull_spec  what to pull, and the report of a pull    open_pull  a pull under way, and its missing parts
"""
