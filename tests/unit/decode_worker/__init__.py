"""TODO tests/unit/decode_worker."""
