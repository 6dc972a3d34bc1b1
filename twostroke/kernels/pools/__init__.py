"""The pages of a worker as kernels see them."""
