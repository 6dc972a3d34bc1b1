"""Trials that break, load or imitate a running cluster."""
