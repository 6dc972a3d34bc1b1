"""This package runs one worker as several processes of one host, its ranks: each computes a part of every layer.

group       sums over all ranks and gathered results, in memory that the ranks share
sums        the interface of a model over such a group
collectives sums and gathered results between devices
processes   the further ranks as child processes of the first one: started, given steps, watched, ended
rank        what such a process does
"""
