"""Secrets, certificates, which files are trusted, and which connection goes where too many come."""
