"""Page forms on a worker.

branch  exact values beside the pages of unfinished blocks, where a page is stored as a whole
"""
