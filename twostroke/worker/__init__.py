"""The host that every worker process is: pool + engine + pull service + pull client + event log + health.

worker         the plain class behind a Ray actor or a process of its own
host           the parts of one life of a worker, put together
loop           admit, plan, run, settle: as long as there is work
pages_service  serves Pull: announces blocks as they become readable
pull_client    pulls blocks from another worker, verifies and commits them
gate           who may ask: the right life, the same KV, not while draining
events         the event log, followed by routers
news           wakes everybody who waits, each time something happened
metrics        what a worker counts
control        GetServerInfo, GetModelInfo, GetLoad, SubscribeKvEvents, Drain
process        a worker as a process without Ray
"""
