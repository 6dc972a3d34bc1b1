"""Attention over pages by the fused kernel of torch."""
