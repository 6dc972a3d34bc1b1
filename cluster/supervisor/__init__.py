"""The supervisor keeps the workers of one fleet alive and tells the routers which workers there are.

supervisor     observes, plans and acts; creates worker actors and waits for the end of each one's `run()`
plan           decides which worker is created or started now, and when to look again: pure
view           what the supervisor knows of each worker, as launchers and routers see it
actors         the class that Ray runs on a node, around the plain worker class
drains         let a worker finish, hand over its requests and leave, restart, sleep or switch role
weights        decides which worker loads new weights next, and when requests go to them: pure
replacement    checks whether a model has other weights than the one that is served, and nothing else
node_watch     drains the workers of Ray nodes that are about to end
fleet_service  sends every router the current view
"""
