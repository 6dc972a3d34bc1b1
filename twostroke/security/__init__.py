"""Secrets, certificates, and which files are trusted."""
