"""TODO tests/unit/worker."""
