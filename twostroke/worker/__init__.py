"""The host that every worker process is: pool + engine + pull service + pull client + event log + health.

worker         the plain class behind a Ray actor or a process of its own
host           the parts of one life of a worker, put together
loop           admit, plan, run, settle: as long as there is work
rates          what steps have cost so far, for the next one's budget and for routers
calibration    the same before the first: a short sweep through the runner
links          how fast pages come from each other worker
pages_service  serves Pull: announces blocks as they become readable
pull_client    pulls blocks from another worker, verifies and commits them
peer_pulls     before a prompt is computed: what a peer holds of it
resident       serves pulls from the cache alone
digests        checksums of pages, off the event loop where they take long
gate           who may ask: the right life, the same KV, not while draining
events         the event log, followed by routers
news           wakes everybody who waits, each time something happened
metrics        what a worker counts
control        GetServerInfo, GetModelInfo, GetLoad, SubscribeKvEvents, Drain
process        a worker as a process without Ray
"""
