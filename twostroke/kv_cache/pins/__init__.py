"""Pins of one worker: prefixes that stay in its pool.

pin_table  leases on blocks with an owner and an end, and the caps that they keep
"""
