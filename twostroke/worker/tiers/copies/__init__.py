"""Pages that go down to the lower tiers.

offload          what the pool tells of its blocks, and which of them are copied
copy_target      room for a page on its way
eviction_copies  copies pages that a claim is about to evict
turn_copies      copies blocks at the end of an answer
"""
