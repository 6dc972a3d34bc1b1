"""This package makes several processes of one host one worker: its ranks, which each compute a part of every layer.

group       sums over all ranks and gathered results, in memory that the ranks share
"""
