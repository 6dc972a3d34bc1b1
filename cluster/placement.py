"""Where an actor goes, as Ray options: node labels where nodes carry them, custom resources where they exist. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.config import Role, RoleConfig

ROLE_LABEL = "role"
"""Node label, as in `ray start --labels role=prefill`."""
ROLE_RESOURCE_SHARE = 0.001
"""Of a custom resource named like the role: it says where, not how many."""
ROUNDING = 1e-9
"""Three thirds of a GPU are one."""
_KEYS = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Ray's names of what nodes have -> those of what actors ask for."""
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

    @property
    def is_head(self) -> bool:
        return HEAD_RESOURCE in self.resources


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


def worker_options(
    nodes: Sequence[Node], role: Role, asked: RoleConfig, *, worker_count: int, wants_gpu: bool
) -> dict[str, Any]:
    """Options for a worker's actor.

    Where nothing is asked for, a node of its role is preferred; while none is there, a worker on a node of the other
    role beats no worker.
    """
    options: dict[str, Any] = {"num_cpus": asked.num_cpus, **_labels(nodes, role, asked)}
    if not asked.num_cpus and asked.memory_bytes is None:
        # All nodes would be equally empty, and what is on one node dies with it. (Taken in turns, they may be crowded
        # all the same: whoever minds asks for CPUs or memory, of which Ray takes those of the emptiest node.)
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
    elif wants_gpu and gpus > 0:
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
        # Ray takes no empty selector: first all that is preferred, then what lacks the first of it, and so on.
        options["fallback_strategy"] = [
            {"label_selector": must | {key: _but(value)}} for key, value in preferred.items() if key not in must
        ]
    return options


def _but(value: str) -> str:
    return value.removeprefix("!") if value.startswith("!") else f"!{value}"


def misfit(nodes: Sequence[Node], role: Role, asked: RoleConfig, count: int) -> Misfit | None:
    """Why so many workers of a role do not fit onto these nodes; None where they do."""
    fitting = list(nodes)
    for key, value in asked.labels.items():
        there = sorted({node.labels[key] for node in nodes if key in node.labels})
        fitting = [node for node in fitting if _matches(node.labels.get(key), value)]
        if not fitting:
            has = f"nodes have {', '.join(there)}" if there else "no node has that label"
            return Misfit(f"labels.{key}", f"no node for {role.value} workers has {key}={value}; {has}")
    for name, amount in asked.resources.items():
        most = max((node.resources.get(name, 0.0) for node in fitting), default=0.0)
        room = sum(int(node.resources.get(name, 0.0) / amount + ROUNDING) for node in fitting)
        key = f"resources.{_KEYS.get(name, name)}"
        if most < amount:
            return Misfit(key, f"a {role.value} worker asks for {amount:g} {name}, and no node has more than {most:g}")
        if room < count:
            return Misfit(
                key, f"{count} {role.value} workers ask for {amount:g} {name} each, and nodes have room for {room}"
            )
    return None


def first_misfit(nodes: Sequence[Node], asks: Sequence[tuple[Role, RoleConfig, int]]) -> tuple[Role, Misfit] | None:
    """Why not all of these fit where no node will be added: one by one, or together."""
    for role, asked, count in asks:
        if count and (found := misfit(nodes, role, asked, count)) is not None:
            return role, found
    totals: dict[str, float] = {}
    for role, asked, count in asks:
        for name, amount in asked.resources.items():
            totals[name] = totals.get(name, 0.0) + amount * count
            there = sum(node.resources.get(name, 0.0) for node in nodes)
            if totals[name] > there + ROUNDING:
                why = f"all workers together ask for {totals[name]:g} {name}, and nodes have {there:g}"
                return role, Misfit(f"resources.{_KEYS.get(name, name)}", why)
    return None


@dataclass(frozen=True, slots=True)
class Misfit:
    key: str
    """Of the role."""
    why: str


def _matches(label: str | None, wanted: str) -> bool:
    """As Ray's label selectors: VALUE, !VALUE, in(A, B), !in(A, B)."""
    is_negated, text = wanted.startswith("!"), wanted.removeprefix("!")
    listed = text.removeprefix("in(").removesuffix(")").split(",") if text.startswith("in(") else [text]
    return (label in {value.strip() for value in listed}) != is_negated
