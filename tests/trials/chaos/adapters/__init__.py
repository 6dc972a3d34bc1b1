"""Adapters that are loaded, replaced and unloaded while clients ask: `versions` makes them, `churn` plays it."""
