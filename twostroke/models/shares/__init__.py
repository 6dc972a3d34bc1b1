"""The share of a model, its weights and its pages that each rank of a worker has."""
