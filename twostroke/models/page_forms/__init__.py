"""What page forms of few bits ask of a model: centers of its keys, and channels of one size."""
