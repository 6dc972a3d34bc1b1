"""What a worker does for others, and asks of its peers.

pages_service  serves Pull and Fetch    cache_handoff  a draining worker's blocks go to successors
control        the Control service
fetch          blocks into the cache
"""
