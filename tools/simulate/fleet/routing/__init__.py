"""A simulated router.

router             takes requests in and gives them to workers
simulated_routing  the live router's decisions
feed               its event stream from a worker
"""
