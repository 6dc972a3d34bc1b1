"""Suppliers bring the missing parts of an admitted sequence, so that the scheduler need not compute them.

A supplier can write parts of blocks: the host memory or the disk of this worker, a page source, a peer. The suppliers
of a sequence have an order. Each one takes what it brings sooner than those after it, and hands on what it does not
bring in the end. The scheduler computes what no supplier takes: it computes every arriving page without a writer.

supply     the port: what a supplier is asked; the suppliers of one sequence, and what came of them
remote     page sources and peers as suppliers: each begins a pull
pull_spec  what is to be pulled, and what came of it    open_pull  what of a pull under way is still to come
"""
