"""Measurements of the product's parts and of whole clusters: `python -m tests.bench NAME`, or `make bench-NAME`."""
