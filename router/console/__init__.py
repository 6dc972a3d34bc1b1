"""The console: one page for operators, and the JSON behind it, on the port of clients.

The page's files are for everybody; they say nothing of the cluster. Everything else asks for an operator's key. What
the page shows is drawn from what the router has anyway: its workers, its recorder, its prefix index, the supervisor's
pins. Nothing is computed without a viewer, and what several viewers look at is computed once.
"""
