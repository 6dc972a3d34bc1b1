"""What every worker process has: pool, engine, pull service, pull client, event log and health service.

worker             the plain class behind a Ray actor or a process of its own
process            a worker as a process without Ray
host               the parts of one epoch of a worker
event_feed         the event log as routers follow it
engine_state       what is kept over changes of role: model, pages, cached blocks
request_validator  refuses other epochs and fingerprints, and new work while draining
condition          wakes all waiters at each notification
metrics            the worker's metrics
branches           the port of branches: what a feature may give a worker
answers            the port of features that single answers may have
role_host          a worker and its role, as they see each other
pull_ends          the pages that a worker serves, and where pulled pages arrive
services/          calls of others to a worker     pulls/    pages that it pulls
supply/            suppliers of missing blocks     measured/ costs of steps, rates of links, limits
steps/             engine steps

Branches: adapters/, drafts/, page_forms/, pins/, tiers/
"""
