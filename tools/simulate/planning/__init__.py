"""How many workers a load needs.

plan      `simulate plan`: the smallest fleet that keeps a promise, as tables and a page
sizing    the search for that fleet, and where splitting pays
scale     `simulate scale`: the live planner over a simulated fleet
demand    what a trace demands and what a fleet can do
"""
