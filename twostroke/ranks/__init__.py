"""This package runs one worker as several processes of one host, its ranks: each computes a part of every layer.

group       sums over all ranks and gathered results, in memory that the ranks share
collectives the same as a model calls them: over such a group, or between devices
processes   the further ranks as child processes of the first one: started, given steps, watched, ended
rank        what such a process does
"""
