"""Decides where an actor goes, as Ray options, and which nodes are requested. Pure.

Node labels are used where nodes carry them, custom resources where they exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.values.worker_counts import WorkerCounts
from twostroke.config import ModelConfig, Role, RoleConfig
from twostroke.config.worker import ranks_of

ROLE_LABEL = "role"
"""Node label, as in `ray start --labels role=prefill`."""
ROLE_RESOURCE_SHARE = 0.001
"""Share of a custom resource named like the role. It says where a worker goes, not how many fit."""
ROUNDING = 1e-9
"""Tolerance by which three thirds of a GPU are one."""
_KEYS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Names of the options of actors, by Ray's names of what nodes have."""
HEAD_RESOURCE = "node:__internal_head__"
"""Resource of which Ray gives the head node one."""
HEAD_RESOURCE_SHARE = 0.001
"""Share of `HEAD_RESOURCE` that an actor asks for. It says where the actor goes, not how many fit."""


@dataclass(frozen=True, slots=True)
class Node:
    """One living Ray node."""

    node_id: str
    address: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]

    @property
    def is_head(self) -> bool:
        return HEAD_RESOURCE in self.resources


def nodes_from_ray(records: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Returns the living nodes among what `ray.nodes()` says."""
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


def processes_of(model: ModelConfig, role: Role) -> int:
    """Returns how many processes compute for a worker of a role: one for each of its ranks."""
    return ranks_of(model, role)


def gpus_of(model: ModelConfig, role: Role) -> int:
    """Returns how many GPUs a worker of a role takes where there are GPUs: one for each process that computes."""
    return 0 if model.is_paced or model.device == "cpu" else processes_of(model, role)


def with_gpus(nodes: Sequence[Node], asked: RoleConfig, gpus: int) -> RoleConfig:
    """Returns what a worker asks for: where nodes have GPUs, all that it takes, if it takes several."""
    if asked.num_gpus is not None or gpus <= 1 or not any(node.resources.get("GPU") for node in nodes):
        return asked
    return asked.model_copy(update={"num_gpus": float(gpus)})


def worker_options(
    nodes: Sequence[Node], role: Role, asked: RoleConfig, *, worker_count: int, gpus_each: int
) -> dict[str, Any]:
    """Returns the options for a worker's actor. It takes `gpus_each` GPUs where there are GPUs.

    A worker that asks for nothing prefers a node of its role. While there is none, it goes to a node of the other role.
    """
    asked = with_gpus(nodes, asked, gpus_each)
    options: dict[str, Any] = {"num_cpus": asked.num_cpus, **_labels(nodes, role, asked)}
    if not asked.num_cpus and asked.memory_bytes is None:
        # Without a request all nodes look equally empty, and workers on one node die together. Nodes taken in turns may
        # still be crowded; a request for CPUs or memory makes Ray take the emptiest node.
        options["scheduling_strategy"] = "SPREAD"
    resources = {name: amount for name, amount in asked.custom.items() if amount}
    if not resources and any(role.value in node.resources for node in nodes):
        resources = {role.value: ROLE_RESOURCE_SHARE}
    if resources:
        options["resources"] = resources
    if asked.memory_bytes is not None:
        options["memory"] = asked.memory_bytes
    gpus = sum(node.resources.get("GPU", 0.0) for node in nodes)
    if asked.num_gpus is not None:
        options["num_gpus"] = asked.num_gpus
    elif gpus_each and gpus > 0:
        options["num_gpus"] = 1 if worker_count <= gpus else 1 / math.ceil(worker_count / gpus)
    return options


def _labels(nodes: Sequence[Node], role: Role, asked: RoleConfig) -> dict[str, Any]:
    must, preferred = dict(asked.labels), dict(asked.prefer_labels)
    if not must and not preferred and any(node.labels.get(ROLE_LABEL) for node in nodes):
        preferred = {ROLE_LABEL: role.value}
    options: dict[str, Any] = {}
    if must or preferred:
        options["label_selector"] = must | preferred
    if preferred:
        # Ray takes no empty selector: all preferences come first, then what lacks the first one, and so on.
        options["fallback_strategy"] = [
            {"label_selector": must | {key: _negated(value)}} for key, value in preferred.items() if key not in must
        ]
    return options


def _negated(value: str) -> str:
    return value.removeprefix("!") if value.startswith("!") else f"!{value}"


def unplaceable(nodes: Sequence[Node], role: Role, asked: RoleConfig, count: int) -> Unplaceable | None:
    """Returns why this many workers of a role do not fit onto these nodes; None where they do."""
    fitting = list(nodes)
    for key, value in asked.labels.items():
        there = sorted({node.labels[key] for node in nodes if key in node.labels})
        fitting = [node for node in fitting if _matches(node.labels.get(key), value)]
        if not fitting:
            has = f"nodes have {', '.join(there)}" if there else "no node has that label"
            return Unplaceable(f"labels.{key}", f"no node for {role.value} workers has {key}={value}; {has}")
    for name, amount in asked.resources.items():
        most = max((node.resources.get(name, 0.0) for node in fitting), default=0.0)
        room = sum(int(node.resources.get(name, 0.0) / amount + ROUNDING) for node in fitting)
        key = f"resources.{_KEYS.get(name, name)}"
        if most < amount:
            return Unplaceable(
                key, f"a {role.value} worker asks for {amount:g} {name}, and no node has more than {most:g}"
            )
        if room < count:
            return Unplaceable(
                key, f"{count} {role.value} workers ask for {amount:g} {name} each, and nodes have room for {room}"
            )
    return None


def first_unplaceable(
    nodes: Sequence[Node], asks: Sequence[tuple[Role, RoleConfig, int]]
) -> tuple[Role, Unplaceable] | None:
    """Returns why the workers, one by one or together, do not fit where no node will be added."""
    for role, asked, count in asks:
        if count and (found := unplaceable(nodes, role, asked, count)) is not None:
            return role, found
    totals: dict[str, float] = {}
    for role, asked, count in asks:
        for name, amount in asked.resources.items():
            totals[name] = totals.get(name, 0.0) + amount * count
            there = sum(node.resources.get(name, 0.0) for node in nodes)
            if totals[name] > there + ROUNDING:
                why = f"all workers together ask for {totals[name]:g} {name}, and nodes have {there:g}"
                return role, Unplaceable(f"resources.{_KEYS.get(name, name)}", why)
    return None


@dataclass(frozen=True, slots=True)
class Unplaceable:
    key: str
    """Key in the section of the role."""
    why: str


def _matches(label: str | None, wanted: str) -> bool:
    """Matches as Ray's label selectors do: VALUE, !VALUE, in(A, B), !in(A, B)."""
    is_negated, text = wanted.startswith("!"), wanted.removeprefix("!")
    listed = text.removeprefix("in(").removesuffix(")").split(",") if text.startswith("in(") else [text]
    return (label in {value.strip() for value in listed}) != is_negated


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """Arguments of `ray.autoscaler.sdk.request_resources`: a bundle and a node selector for each worker."""

    bundles: list[dict[str, float]] = field(default_factory=list)
    selectors: list[dict[str, str]] = field(default_factory=list)


def node_request_for(placed: WorkerCounts, roles: Mapping[Role, RoleConfig]) -> NodeRequest:
    """Returns the request for this many workers. Workers that ask for nothing fit onto any node and request none."""
    room = NodeRequest()
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
