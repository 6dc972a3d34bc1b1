"""Trials of models that run by the code of transformers."""
