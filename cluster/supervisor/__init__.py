"""The supervisor keeps the workers of one fleet alive and tells the routers which workers there are.

supervisor     observes, plans and acts; answers operators and tells the routers what has changed
fleet          what is known of each worker and its process; it alone changes that
epochs         creates worker actors and waits for the end of each one's `run()`
reconcile      brings the fleet to its desired state: plans, drains, changes of weights, scaling
pins           remembers the fleet's pins and gives them to every worker that is to hold them
branches       what it keeps for the fleet besides workers: a table
backend        what a restarted supervisor finds again: an interface, which `cluster/ray` implements
stored         messages that outlive the supervisor
view           one worker, as launchers and routers see it
actors         the class that Ray runs on a node, around the plain worker class
fleet_service  sends every router the current view
"""
