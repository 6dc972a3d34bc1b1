"""Matrix products with fixed weights, and what lies between them."""
