"""Pins of a running server, as operators add and remove them: over gRPC, or in the console."""
