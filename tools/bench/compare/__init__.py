"""`twostroke bench compare`: the same loads against several servers, in turns, and what one is over the other.

options   the flags, checked once        scenario  a load's name to its requests: pure
rounds    who is asked when, and asking
report    ratios with their spread, as a table and JSON
page      the same with figures, as one HTML file
"""
