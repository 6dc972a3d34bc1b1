"""The pages of a worker as tensors for kernels."""
