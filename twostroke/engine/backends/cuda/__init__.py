"""A backend that computes a model on a CUDA device."""
