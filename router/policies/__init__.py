"""All routing policies by name: `--policy NAME`."""

from __future__ import annotations

from router.policies.baselines import choose_least_loaded, choose_randomly, choose_round_robin
from router.policies.priced import choose_cheapest
from router.policy import Policy
from twostroke.errors import ConfigError

POLICIES: dict[str, Policy] = {
    "kv": choose_cheapest,
    "round-robin": choose_round_robin,
    "random": choose_randomly,
    "least-loaded": choose_least_loaded,
}


def policy_named(name: str) -> Policy:
    """Raises ConfigError, listing what there is."""
    if name not in POLICIES:
        raise ConfigError(f"--policy must be one of {', '.join(POLICIES)}; got {name!r}", field="policy")
    return POLICIES[name]
