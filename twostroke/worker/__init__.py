"""The host that every worker process is: pool + engine + pull service + pull client + event log + health.

worker         the plain class behind a Ray actor or a process of its own
host           the parts of one life of a worker, put together
loop           admit, plan, run, settle: as long as there is work
pages_service  serves Pull: announces blocks as they become readable
pull_client    pulls blocks from another worker, verifies and commits them
events         the event log, followed by routers
control        GetServerInfo, GetModelInfo, GetLoad, SubscribeKvEvents, Drain
process        a worker as a process without Ray
"""
