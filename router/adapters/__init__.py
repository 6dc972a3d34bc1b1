"""Adapters of a running server, as operators load and unload them: over gRPC, or with vLLM's calls over HTTP."""
