"""Pages that come back from the lower tiers.

tier_loads      all of the following
sequence_loads  which blocks of a sequence are loaded: the lower tiers as a supplier
shared_loads    what is loaded for other workers, and for prefetch
running         loads under way
prices          what a load costs, and what it is compared with
depth           how deep loads reach where there are several page groups
prefetch        brings blocks of waiting requests closer
"""
