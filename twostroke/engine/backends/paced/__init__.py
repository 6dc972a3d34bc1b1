"""A backend that waits instead of computing."""
