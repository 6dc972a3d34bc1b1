"""Which cores a worker computes on, and which it borrows from its neighbours."""
