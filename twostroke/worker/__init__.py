"""The host that every worker process is: pool + engine + pull service + pull client + event log + health.

worker             the plain class behind a Ray actor or a process of its own
process            a worker as a process without Ray
host               the parts of one epoch of a worker
event_feed         the event log as routers follow it
engine_state       what is kept over changes of role: model, pages, cached blocks
request_validator  refuses other epochs and fingerprints, and new work while draining
condition          wakes all waiters at each notification
metrics            the worker's metrics
page_exchange      puts the parts of pulls together, with the page transports
services/          what a worker answers others    pulls/    pages that it pulls
supply/            who brings missing blocks       landing/  pages where they arrive
steps/             engine steps                    tiers/    pages in host memory and on disk
measured/          costs of steps, rates of links, limits of the machine
"""
