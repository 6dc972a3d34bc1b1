"""Native kernels for CPUs: one C++ file with a plain C interface, built on first use by the system's compiler."""
