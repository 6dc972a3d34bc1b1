"""The requests of a log or a trace: the chains of their blocks, and the hit rate of a pool of any capacity."""
