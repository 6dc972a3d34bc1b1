"""Decides how many workers of each role there are, and makes it so.

capacity       says how many workers a load needs to keep its latency targets: pure
planner        decides from what was observed how many workers there should be now: pure
autoscaler     gives the planner what routers report, and its decisions to the reconciler
desired_state  which workers shall be there, in which role; stored, so that a restarted supervisor goes on with it
reconciler     owns the desired state and brings the fleet there, one worker of a role at a time
status         what operators are told
"""
