"""Who a client is (API keys), and how much it may use (limits)."""
