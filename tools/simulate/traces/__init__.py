"""Requests to simulate: recorded ones in the formats of others and of our own request log, and generated ones."""
