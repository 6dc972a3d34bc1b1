"""Choices that the settings cannot name, because they are the router's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.routing.policies import POLICIES

CHOICES: Mapping[str, Sequence[str]] = {"--policy": sorted(POLICIES)}
