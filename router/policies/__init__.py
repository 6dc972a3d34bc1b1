"""All routing policies by name: `--policy NAME`."""

from __future__ import annotations

from collections.abc import Callable

from router.policies.baselines import choose_least_requests, choose_randomly, choose_round_robin
from router.policies.priced import Priced
from router.policy import Policy
from twostroke.errors import ConfigError

POLICIES: dict[str, Callable[[], Policy]] = {
    "kv": Priced,
    "round-robin": lambda: choose_round_robin,
    "random": lambda: choose_randomly,
    "least-requests": lambda: choose_least_requests,
}
"""Name -> a new one: some remember what they chose."""


def policy_named(name: str) -> Policy:
    """Raises ConfigError, listing what there is."""
    if name not in POLICIES:
        raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}; got {name!r}", field="policy")
    return POLICIES[name]()
