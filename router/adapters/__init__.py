"""LoRA adapters, which operators load and unload over gRPC, or over HTTP with vLLM's calls."""
