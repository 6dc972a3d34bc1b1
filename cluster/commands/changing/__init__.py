"""Commands that change a running server: its workers, their weights, and what they hold."""
