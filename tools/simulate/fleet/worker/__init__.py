"""A simulated worker: what it shares with a live one, and what stands for its models, wires and clocks.

host               one epoch of a worker                  worker_lifecycle   which workers are alive
steps              the work loop, many steps at once      live_loop          the live work loop, one step at a time
shared_cores/      cores that workers of a host share     decode_service     calls to a decode worker
pulls              pages from one worker to another       tiers              where evicted pages go
tokens             when each token was emitted            interfaces         the worker, as its parts see it
branches           what features add
"""
