"""Flags that are no settings, and what flags name: secrets, certificates, a running server.

The flags of `twostroke serve` and `twostroke router` are derived from `twostroke.config`.
"""
