"""Brings a fleet to its desired state, one worker of a role at a time.

desired      owns the desired state and stores each change of it
commands     changes it for operators, and waits until the fleet matches it
autoscaler   gives the planner what routers report, and sets the desired counts to what it decides
reconciler   looks at each worker and begins what brings it to its slot
reloads      changes the weights of all workers
parts        the objects that all of these share
drains       let a worker finish, hand over its requests and leave, restart, sleep or switch role; and leave its node
plan         decides which worker is created or started now, and when to look again: pure
weights      decides which worker loads new weights next, and when requests go to them: pure
replacement  checks whether a model has other weights than the one that is served, and nothing else
"""
