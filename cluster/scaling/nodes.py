"""What Ray's autoscaler is asked for: room for as many workers as are wanted, started or not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.planner import Counts
from twostroke.config import Role, RoleConfig


@dataclass(frozen=True, slots=True)
class Room:
    """As `ray.autoscaler.sdk.request_resources` takes it: a bundle and a selector of nodes for each worker."""

    bundles: list[dict[str, float]] = field(default_factory=list)
    selectors: list[dict[str, str]] = field(default_factory=list)


def room_for(placed: Counts, roles: Mapping[Role, RoleConfig]) -> Room:
    """Of workers that ask for nothing, nothing: they fit onto any node, so none is started for them."""
    room = Room()
    for role, count in ((Role.PREFILL, placed.prefill), (Role.DECODE, placed.decode)):
        asked = roles.get(role, RoleConfig())
        bundle = {
            "CPU": asked.num_cpus,
            "GPU": asked.num_gpus or 0.0,
            "memory": float(asked.memory_bytes or 0),
            **asked.custom,
        }
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if bundle:
            room.bundles.extend(dict(bundle) for _ in range(count))
            room.selectors.extend(dict(asked.labels) for _ in range(count))
    return room
