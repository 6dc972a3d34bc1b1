"""Pins, which operators add to and remove from a running server, over gRPC or in the console."""
