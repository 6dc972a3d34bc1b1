"""Ray places the workers and restarts them; this package starts, watches and scales a fleet from the command line.

`twostroke serve`, in the order of what happens:

commands/        turns flags into a ClusterConfig (`commands/serving/serve`)
launch/          checks ports and model, starts routers, Ray and the supervisor, waits, and removes everything
routers/         one process per router, restarted on the same ports when it ends
supervisor/      observes, plans and acts: creates worker actors, awaits their `run()`, informs the routers
scaling/         how many workers of each role there should be
values/          what these exchange: specification, desired state, counts, nodes
terminal/        what a command tells people while it works
ray/             everything that asks Ray: joining it, placing actors, its key-value store
branches         models that workers load besides the served one
clients/         how commands reach a running server, a router's admin port or the supervisor
"""
