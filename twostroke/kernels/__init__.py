"""What a step computes beside matrix products, per device, each beside its torch reference."""
