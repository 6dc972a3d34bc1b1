"""Virtual time: recorded traces and logs in, and what a fleet would have made of them out.

Pools, schedulers and event logs are the live workers' own; index, reservations, admission and policy are the live
router's, handed in as a adapter. Only models, wires and clocks are made up.

simulation   plays a trace against a fleet             fleet        what is simulated
results      what a run was                            queue       what happens when
host         one life of a worker                      lives        who lives, and in which life
prefill      builds pages for pulls                    decode       owns requests, emits tokens
pulls        pages from one worker to another          wire         a worker's end of the network
peers        what a peer holds of a prompt             host_memory  where evicted pages go
steps        how long steps take, many at once         request      one request's way
router         a router                                  feed         its event stream from a worker
adapter        what it asks of whoever decides           traces       recorded requests, whatever recorded them
workloads    requests made up                          oracle       the most that any placement could reuse
request_log  what a live router writes                 fit          a fleet's costs from that
"""
