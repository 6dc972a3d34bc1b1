"""A backend that computes a model on the cores of a machine."""
