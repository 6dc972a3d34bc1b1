"""Measurements of the product's parts and of whole clusters: `python -m tests.trials.bench NAME`, or `make
bench-NAME`."""
