"""Life of an adapter on a worker.

WANTED    a waiting sequence names it, and it is not here
LOADING   it is read, checked and prepared on a thread, while steps go on
LOADED    steps use it; sequences that have begun hold it
EVICTED   nobody held it, another one was wanted, and it had not been used for longest

A worker keeps no list of names: every request says which adapter it is computed with, by digest.
"""
