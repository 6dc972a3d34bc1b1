"""Adapters as the engine has them: slots, products, and the copies of other ranks."""
