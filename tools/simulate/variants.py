"""Policies by name as the simulator runs them: those of `serve --policy`, and ours with one stroke only."""

from __future__ import annotations

from collections.abc import Callable

from cluster.flags.checks import field_of
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


def policy_of(variant: str, *, peer_pulls: bool = True) -> Policy:
    """A new one. Raises ConfigError, listing what there is."""
    if variant in _OWN:
        return _OWN[variant]()
    if not peer_pulls and variant in _WITHOUT_PEERS:
        return _WITHOUT_PEERS[variant]()
    return policy_named(variant)


def variants_from(text: str) -> tuple[str, ...]:
    """Names separated by commas, or all policies."""
    if text == EVERYTHING:
        return tuple(POLICIES)
    variants = tuple(name.strip() for name in text.split(",") if name.strip())
    if not variants:
        raise ConfigError(f"--policies needs a name: {', '.join(POLICIES)}, or {EVERYTHING}", field="policies")
    for variant in variants:
        check_variant("--policies", variant)
    return tuple(dict.fromkeys(variants))


def check_variant(flag: str, variant: str) -> None:
    if variant not in _OWN and variant not in POLICIES:
        known = ", ".join((*POLICIES, *_OWN))
        raise ConfigError(f"{flag} must be of {known}; got {variant!r}", field=field_of(flag))
