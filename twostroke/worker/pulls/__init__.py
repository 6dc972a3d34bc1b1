"""Pages that move between workers: pulled, served and digested.

page_exchange  puts the parts together, with the page transports
pages_service  serves Pull and Fetch            pull_client    pulls blocks, verifies and commits them
pull_call      the puller's end of one call     peer_pulls     fetch a prefix from a peer before computing
fetch          blocks into the cache            cache_handoff  a draining worker's blocks go to successors
digests        digests of own pages             link_rates     measured latency and rate per peer
landing        where a pull's bytes arrive      page_converter converts pages, and what that takes
"""
