"""The memory bill: what a model's pages and weights take on a machine, before anything is started.

`model` says what one page of the model takes in every form. `forms` bills a pool in each of them. `measure` measures
this machine. `requests` turns a request log into hit rates by capacity. `branches` lists
what features add. `bill` asks for all of it. `report` shows it.
"""
