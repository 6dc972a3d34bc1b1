"""A cluster over several hosts of one machine, broken as hosts and cables break: `python -m tests.trials.chaos.hosts`.

network   hosts out of namespaces, their cables and their power
site      what they run: the start scripts of deploy/ray, the launcher; certificates and tokens
"""
