"""Help texts that name their defaults, which are those of `twostroke.config`."""

from __future__ import annotations

from twostroke.config import ClusterConfig

DEFAULTS = ClusterConfig()


def with_default(text: str) -> str:
    return f"{text} (default: %(default)s)"
