"""Commands that show what a running server does."""
