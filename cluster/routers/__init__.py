"""Routers of a launcher: each is a process of its own, which is restarted on the same ports when it ends."""
