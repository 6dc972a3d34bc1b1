"""`twostroke bench goodput`: the highest rate at which enough requests are as fast as was promised.

options   the flags, checked once
trial     one rate at one server, and its requests against the promise, as soon as it is decided
session   trials at several servers in turns, table, JSON
"""
