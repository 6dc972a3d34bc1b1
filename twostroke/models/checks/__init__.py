"""Checks of a model's files before a worker loads them."""
