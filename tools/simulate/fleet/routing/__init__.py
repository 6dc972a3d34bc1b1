"""A simulated router.

router             takes requests in and gives them to workers
routing_adapter    the live router's decisions
feed               its event stream from a worker
"""
