"""Policies by name as the simulator runs them: those of `serve --policy`, and ours with one stroke only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.checks import field_of
from router.routing.policies import POLICIES, policy_named
from router.routing.policies.priced import Priced, Prices
from router.routing.policies.seconds import MooncakeConductor
from router.routing.policy import Policy
from twostroke.errors import ConfigError

OURS = "kv"
BASELINE = "round-robin"
ALWAYS_LOCAL = "always-local"
ALWAYS_REMOTE = "always-remote"
EVERYTHING = "all"
DEFAULT = ("round-robin", "least-requests", OURS)

_OWN: dict[str, Callable[[], Policy]] = {
    ALWAYS_LOCAL: lambda: Priced(Prices(computes_remotely=False)),
    ALWAYS_REMOTE: lambda: Priced(Prices(computes_locally=False)),
}
_WITHOUT_PEERS: dict[str, Callable[[], Policy]] = {
    OURS: lambda: Priced(Prices(pulls_from_peers=False)),
    "mooncake": lambda: MooncakeConductor(balancing=float("inf")),
}
"""Others never pull from peers."""


def policy_of(arm: str, *, peer_pulls: bool = True) -> Policy:
    """A new one. Raises ConfigError, listing what there is."""
    if arm in _OWN:
        return _OWN[arm]()
    if not peer_pulls and arm in _WITHOUT_PEERS:
        return _WITHOUT_PEERS[arm]()
    return policy_named(arm)


def arms_from(text: str) -> tuple[str, ...]:
    """Names separated by commas, or all policies."""
    if text == EVERYTHING:
        return tuple(POLICIES)
    arms = tuple(name.strip() for name in text.split(",") if name.strip())
    if not arms:
        raise ConfigError(f"--policies needs a name: {', '.join(POLICIES)}, or {EVERYTHING}", field="policies")
    for arm in arms:
        check_arm("--policies", arm)
    return tuple(dict.fromkeys(arms))


def check_arm(flag: str, arm: str) -> None:
    if arm not in _OWN and arm not in POLICIES:
        known = ", ".join((*POLICIES, *_OWN))
        raise ConfigError(f"{flag} must be of {known}; got {arm!r}", field=field_of(flag))


def with_baseline(arms: Sequence[str]) -> tuple[str, ...]:
    """Round-robin first: everything is told relative to it."""
    return tuple(dict.fromkeys((BASELINE, *arms)))
