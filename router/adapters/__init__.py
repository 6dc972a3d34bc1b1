"""Adapters as a router knows them: models that the fleet serves beside its own."""
