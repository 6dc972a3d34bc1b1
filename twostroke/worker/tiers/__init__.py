"""The tiers below a worker's pool: evicted and reused pages are kept there, and come back instead of being computed.

branch       what the tiers give a worker
opening      memory is claimed, the folder on disk is locked and read
group_tiers  the tiers of all page groups
page_tiers   the tiers of one page group, as loads see them
host_tier    pages in host memory
disk_tier    pages on disk
disk_writer  writes pages to disk on a thread of its own
copies       pages that go down
loads        pages that come back: the tiers as suppliers of blocks
reader       reads pages on a thread, and checks every one
price        whether loading beats computing
adoption     takes in what dead workers left
metrics      what each tier did, and what changes on it for the event log
"""
