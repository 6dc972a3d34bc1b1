"""Simulated fleets decided by the live router's own objects."""
