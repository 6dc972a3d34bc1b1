"""Matrix products with fixed weights, and the operations between them."""
