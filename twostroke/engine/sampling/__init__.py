"""From logits to tokens and their logprobs, on the host and on a device."""
