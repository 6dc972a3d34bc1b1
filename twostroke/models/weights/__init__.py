"""The weights of a model: read from files, identified by a digest, and laid out as CPUs and devices compute with
them."""
