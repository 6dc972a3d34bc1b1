"""All routing policies by name (`--policy NAME`). `kv` is the default; the baselines know only load, or nothing.

Policies of other systems run only in the simulator: `tools.simulate.rivals`.
"""

from __future__ import annotations

from collections.abc import Callable

from router.routing.policies.baselines import (
    choose_least_requests,
    choose_least_tokens,
    choose_of_two,
    choose_randomly,
    choose_round_robin,
)
from router.routing.policies.priced import Priced, Prices
from router.routing.policy import Policy
from twostroke.base.errors import ConfigError

POLICIES: dict[str, Callable[[], Policy]] = {
    "kv": Priced,
    "kv-no-peers": lambda: Priced(Prices(pulls_from_peers=False)),
    "random": lambda: choose_randomly,
    "round-robin": lambda: choose_round_robin,
    "power-of-two": lambda: choose_of_two,
    "least-requests": lambda: choose_least_requests,
    "least-tokens": lambda: choose_least_tokens,
}
"""Functions that make a new policy, by name."""
CACHE_BLIND = frozenset({"random", "round-robin", "power-of-two", "least-requests", "least-tokens"})
"""Policies that ignore which worker holds which blocks, and where similar prompts went."""
RECONSIDERING = frozenset({"kv", "kv-no-peers"})
"""Policies that may be asked again about a queued request: their choice depends only on the snapshot."""

NARROWING = frozenset({"kv", "kv-no-peers"})
"""Policies that get only a few candidates of a large fleet. The others compare all workers."""


def policy_named(name: str) -> Policy:
    """Returns a new policy. Raises ConfigError with all names if there is none of this name."""
    if name not in POLICIES:
        raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}; got {name!r}", field="policy")
    return POLICIES[name]()
