"""The catalogue of models: what it names, how files come to this machine, and where they lie."""
