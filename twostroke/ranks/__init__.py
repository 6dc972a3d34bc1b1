"""This package makes several processes of one host one worker: its ranks, which each compute a part of every layer.

group       sums over all ranks and gathered results, in memory that the ranks share
sums        the same as a model asks for them
processes   the further ranks as child processes of the first one: started, given steps, watched, ended
rank        what such a process does
"""
