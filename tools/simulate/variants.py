"""Policies by name as the simulator runs them: those of `serve --policy`, rivals, and ours with one phase only."""

from __future__ import annotations

from collections.abc import Callable

from cluster.flags.checks import field_of
from router.routing.policies import POLICIES
from router.routing.policies.priced import Priced, Prices
from router.routing.policy import Policy
from tools.simulate.rivals import RIVALS
from tools.simulate.rivals.seconds import MooncakeConductor
from twostroke.base.errors import ConfigError

OURS = "kv"
BASELINE = "round-robin"
ALWAYS_LOCAL = "always-local"
ALWAYS_REMOTE = "always-remote"
EVERYTHING = "all"
DEFAULT = ("round-robin", "least-requests", OURS)

_ALL: dict[str, Callable[[], Policy]] = POLICIES | RIVALS
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
    """Returns a new one. Raises ConfigError, listing what there is."""
    if variant in _OWN:
        return _OWN[variant]()
    if not peer_pulls and variant in _WITHOUT_PEERS:
        return _WITHOUT_PEERS[variant]()
    check_variant("--policies", variant)
    return _ALL[variant]()


def variants_from(text: str) -> tuple[str, ...]:
    """Names separated by commas, or all policies."""
    if text == EVERYTHING:
        return tuple(_ALL)
    variants = tuple(name.strip() for name in text.split(",") if name.strip())
    if not variants:
        raise ConfigError(f"--policies needs a name: {', '.join(_ALL)}, or {EVERYTHING}", field="policies")
    for variant in variants:
        check_variant("--policies", variant)
    return tuple(dict.fromkeys(variants))


def check_variant(flag: str, variant: str) -> None:
    if variant not in _OWN and variant not in _ALL:
        known = ", ".join((*_ALL, *_OWN))
        raise ConfigError(f"{flag} must be of {known}; got {variant!r}", field=field_of(flag))
