"""A simulated fleet in virtual time: a trace in, and what the fleet would have made of it out.

Roles, pools, schedulers and event logs are the live workers' own; index, reservations, admission and policy are the
live router's. Models, wires and clocks are simulated. So are the work loop and the pull client, because they run many
equal steps at once. A test runs the live ones in parallel and finds the same history.

simulation         runs a trace against a fleet           shape              what is simulated
results            outcomes of a run                      event_queue        what happens when
simulated_request  one request, over all its attempts
scaling            how many workers there are
worker/            workers: steps, pulls, tiers, cores    routing/           routers
"""
