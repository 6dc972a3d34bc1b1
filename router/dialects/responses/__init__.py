"""OpenAI's /v1/responses without a store: input items become the messages of a chat, and its answer output items."""
