"""An honest client beside hostile ones: what one client sends may not hurt another.

entries.py   the table of hostile clients: a name, the port it goes to, whether it shows a key, what it sends
hostile.py   one of them as a process of its own, with a bounded share of a core
honest.py    the client that is measured: a short chat over HTTP and over gRPC, and `/live`, at a steady pace
site.py      the server: a router process and worker processes, plain, or with TLS, keys and cluster TLS
trial.py     a baseline, then a hostile client; what the honest one saw, and what is left in the server afterwards
report.py    the bounds, and the table

`make neighbours ARGS="--for 30m --seed 3"` plays them in random order for that long. The gate plays a few.
"""
