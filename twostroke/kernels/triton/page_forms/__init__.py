"""Attention over 4-bit pages on a CUDA device."""
