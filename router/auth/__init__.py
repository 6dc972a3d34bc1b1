"""Authentication: who a client is (API keys), and how much it may use (limits)."""
