"""What page forms of few bits need from a model: centers of its keys, and key channels of about the same size."""
