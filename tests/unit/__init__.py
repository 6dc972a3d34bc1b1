"""TODO tests/unit."""
