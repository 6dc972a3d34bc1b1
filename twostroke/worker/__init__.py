"""The host that every worker process is: pool + engine + pull service + pull client + event log + health.

worker             the plain class behind a Ray actor or a process of its own
process            a worker as a process without Ray
host               the parts of one epoch of a worker
event_feed         the event log as routers follow it
engine_state       what is kept over changes of role: model, pages, cached blocks
request_validator  refuses other epochs and fingerprints, and new work while draining
condition          wakes all waiters at each notification
control            the Control service             metrics  the worker's metrics
pulls/             pages between workers           steps/   engine steps
tiers/             pages in host memory and on disk
"""
