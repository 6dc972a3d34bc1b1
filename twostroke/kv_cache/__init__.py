"""The KV cache: which block holds which tokens, and which page holds which block. Pure Python, no torch.

block   block hashes: content addressing of tokens
pool    the pages of a worker: free, cached, arriving, active, quarantined
window_parts  what layers with a window keep of blocks, in slots of their own
memory  the bytes behind the pages, wherever they lie, with a generation per page
shared  host memory that other processes may read
events  what a pool stored and removed, as a log
tiers/  copies of pages in host memory and on disk
"""
