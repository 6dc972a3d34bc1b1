"""Requests to simulate: recorded ones in the formats of others and of our own request log, and generated ones.

trace        recorded requests in order            formats    what a line of each format says
workloads    generated requests                    oracle     the most that any placement could reuse of them
"""
