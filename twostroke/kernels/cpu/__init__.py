"""This package holds the native CPU kernels: C++ with a C interface, compiled on first use."""
