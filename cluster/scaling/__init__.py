"""Decides how many workers of each role there are. Pure.

capacity  says how many workers a load needs to keep its latency targets
planner   decides from what was observed how many workers there should be now
"""
