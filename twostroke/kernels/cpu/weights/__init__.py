"""Weights as the native kernels read them: their order, their sizes and their memory."""
