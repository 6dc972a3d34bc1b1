"""The console: one page for operators, and its JSON API, on the clients' port.

The page's files need no key, because they hold nothing about the cluster. The API needs an operator's key. It shows
what the router has anyway: its workers, its recorder, its prefix index, the supervisor's pins. Nothing is computed
without a viewer, and lists that several viewers see are computed once.
"""
