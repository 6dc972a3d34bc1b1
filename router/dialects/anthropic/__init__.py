"""Anthropic's Messages API: bodies of requests, and responses as JSON or as server-sent events."""
