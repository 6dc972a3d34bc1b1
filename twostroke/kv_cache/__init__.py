"""The KV cache: which block holds which tokens, and which page holds which block. Pure Python, no torch.

block   block hashes: content addressing of tokens
pool    the pages of a worker, in the groups of its model's layers
groups/  the port of page groups, and the group of full attention
windows/  the group of layers with a window, which keeps the last blocks
memory  the bytes behind the pages, wherever they lie, with a generation per page
shared  host memory that other processes may read
events  what a pool stored and removed, as a log
tiers/  copies of pages in host memory and on disk
pins/   prefixes that stay in the pool
"""
