"""TODO tests/unit/transfer."""
