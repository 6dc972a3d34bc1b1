"""The tiers below a worker's pool: evicted and reused pages are kept there, and come back instead of being computed.

opening       memory is claimed, the folder on disk is locked and read
group_tiers   the tiers of all page groups
page_tiers    the tiers of one page group: what the pool tells them, what they announce
host_tier     pages in host memory
disk_tier     pages on disk, written on a thread of its own
loads         pages that come back
window_loads  where loads may end, and the window parts that go with their ends
reader        reads pages on a thread, and checks every one
prefetch      brings blocks of waiting requests closer
price         whether loading beats computing
slow_disk     finds out whether a slow disk is fast again
adoption      takes in what dead workers left
metrics       what each tier did
"""
