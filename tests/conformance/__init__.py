"""Data that any implementation can be tried with, and the scripts that make it."""
