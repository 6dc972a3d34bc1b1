"""What computes the steps of a worker: one backend for each kind of device."""
