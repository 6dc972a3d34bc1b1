"""Pages that go down to the lower tiers.

offload          handles events of the pool's blocks, and decides which are copied
copy_target      room for a page on its way
eviction_copies  copies pages that a claim is about to evict
turn_copies      copies a few pages in each turn of the event loop
"""
