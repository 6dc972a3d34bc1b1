"""Where an actor goes, as Ray options: node labels where nodes carry them, custom resources where they exist. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.config import Role

ROLE_LABEL = "role"
"""Node label, as in `ray start --labels role=prefill`."""
ROLE_RESOURCE_SHARE = 0.001
"""Of a custom resource named like the role: it says where, not how many."""
HEAD_RESOURCE = "node:__internal_head__"
"""Ray gives the head node one of this resource."""
HEAD_RESOURCE_SHARE = 0.001
"""Of it: it says where, not how many."""


@dataclass(frozen=True, slots=True)
class Node:
    """One living Ray node."""

    node_id: str
    address: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]


def nodes_from_ray(records: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The living ones among what `ray.nodes()` says."""
    return [
        Node(
            node_id=record["NodeID"],
            address=record["NodeManagerAddress"],
            labels=record.get("Labels") or {},
            resources=record.get("Resources") or {},
        )
        for record in records
        if record["Alive"]
    ]


def worker_options(nodes: Sequence[Node], role: Role, *, worker_count: int, wants_gpu: bool) -> dict[str, Any]:
    """Options for a worker's actor.

    A node of its role is preferred; while none is there, a worker on a node of the other role beats no worker.
    """
    # Whoever asks for no CPUs would find all nodes equally empty, and what is on one node dies with it.
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
    if any(node.labels.get(ROLE_LABEL) for node in nodes):
        options["label_selector"] = {ROLE_LABEL: role.value}
        options["fallback_strategy"] = [{"label_selector": {ROLE_LABEL: f"!{role.value}"}}]
    if any(role.value in node.resources for node in nodes):
        options["resources"] = {role.value: ROLE_RESOURCE_SHARE}
    gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    if wants_gpu and gpus > 0:
        options["num_gpus"] = 1 if worker_count <= gpus else 1 / math.ceil(worker_count / gpus)
    return options
