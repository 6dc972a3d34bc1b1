"""The weights of a model: read from files, proved by a digest, laid out as CPUs and devices compute with them."""
