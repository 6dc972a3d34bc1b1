"""The signature of attention over pages, the rules of layers, and the arguments of launches."""
