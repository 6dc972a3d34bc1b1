"""A simulated fleet in virtual time: a trace in, and what the fleet would have made of it out.

Pools, schedulers and event logs are the live workers' own; index, reservations, admission and policy are the live
router's. Only models, wires and clocks are simulated.

simulation         runs a trace against a fleet           shape            what is simulated
results            outcomes of a run                      event_queue      what happens when
host               one epoch of a worker                  worker_lifecycle which workers are alive
prefill            builds pages for pulls                 decode           owns requests, emits tokens
pulls              pages from one worker to another       wire             a worker's end of the network
peers              what a peer holds of a prompt          host_memory      where evicted pages go
steps              how long steps take                    scaling          how many workers there are
router             a router                               feed             its event stream from a worker
routing_adapter    the live router's decisions            simulated_request  one request, over all its attempts
"""
