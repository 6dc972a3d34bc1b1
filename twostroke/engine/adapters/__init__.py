"""Adapters as the engine has them: slots and products."""
