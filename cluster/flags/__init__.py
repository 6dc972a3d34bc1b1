"""Flags that are not settings, and the files that flags name.

The flags of `twostroke serve` and `twostroke router` are derived from `twostroke.config`.
"""
