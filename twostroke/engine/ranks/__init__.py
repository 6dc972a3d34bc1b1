"""Workers of several ranks: a backend's plan, carried out by several processes."""
