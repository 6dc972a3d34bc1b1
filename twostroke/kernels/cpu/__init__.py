"""Native kernels for CPUs: C++ with a plain C interface, built on first use by the system's compiler."""
