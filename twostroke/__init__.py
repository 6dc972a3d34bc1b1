"""twostroke, the library: what a worker of a prefill/decode disaggregated serving cluster is made of."""

__version__ = "0.1.0"
