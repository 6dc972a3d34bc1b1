"""The kernels of a step for each device, and torch references: attention, matrix products, and elementwise
operations."""
