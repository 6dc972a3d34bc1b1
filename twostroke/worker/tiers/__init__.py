"""The tiers below a worker's pool: evicted and reused pages are kept there, and come back instead of being computed.

page_tiers  the tiers of one worker: what the pool tells them, what they announce
host_tier   pages in host memory            disk_tier   pages on disk, written and read on threads of its own
loads       pages that come back            price       whether loading beats computing
metrics     what each tier did
"""
