"""twostroke, the library: what a worker of a prefill/decode disaggregated serving cluster is made of."""
