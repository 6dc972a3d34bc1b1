"""Transports within one host: shm for host memory, cuda_ipc for GPU memory."""
