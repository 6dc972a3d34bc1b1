"""The values that `--policy` takes: the names in the router's table of policies.

The setting itself cannot list them, because `twostroke.config` does not import the router.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.routing.policies import POLICIES

CHOICES: Mapping[str, Sequence[str]] = {"--policy": sorted(POLICIES)}
"""The values of a setting by its flag."""
