"""Commands that start and end servers and routers, and that provide the models and the keys that they need."""
