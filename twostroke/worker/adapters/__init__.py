"""Life of an adapter on a worker.

WANTED    a waiting sequence names it, and it is not here
LOADING   it is read, checked and prepared on a thread while steps run
LOADED    steps use it; sequences that have begun hold it
EVICTED   it had no holder and was the least recently used one when another one was wanted

A worker keeps no list of names: every request says which adapter it is computed with, by digest.
"""
