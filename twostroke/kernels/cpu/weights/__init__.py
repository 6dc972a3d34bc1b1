"""The weights of the native kernels: their order, their sizes and their memory."""
