"""Where actors go, by labels, custom resources and GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cluster.placement import Node, nodes_from_ray, worker_options
from twostroke.config import Role


def node(
    name: str = "n0", labels: Mapping[str, str] | None = None, resources: Mapping[str, float] | None = None
) -> Node:
    return Node(name, "10.0.0.1", labels or {}, resources or {})


def test_a_plain_node_is_asked_for_nothing_not_even_a_cpu_and_workers_are_spread() -> None:
    options = worker_options([node(resources={"CPU": 2})], Role.DECODE, worker_count=2, wants_gpu=True)
    assert options == {"num_cpus": 0, "scheduling_strategy": "SPREAD"}


def test_where_nodes_carry_role_labels_the_own_role_is_preferred_and_any_other_accepted() -> None:
    options = worker_options([node(labels={"role": "prefill"})], Role.PREFILL, worker_count=2, wants_gpu=False)
    assert options["label_selector"] == {"role": "prefill"}
    assert options["fallback_strategy"] == [{"label_selector": {"role": "!prefill"}}]


def test_a_custom_resource_is_asked_for_only_where_it_exists() -> None:
    nodes = [node(resources={"decode": 1})]
    assert "resources" in worker_options(nodes, Role.DECODE, worker_count=2, wants_gpu=False)
    assert "resources" not in worker_options(nodes, Role.PREFILL, worker_count=2, wants_gpu=False)


@pytest.mark.parametrize(("workers", "gpus", "share"), [(2, 2, 1), (1, 8, 1), (2, 1, 0.5), (5, 2, 1 / 3)])
def test_gpus_are_shared_out_so_that_every_worker_fits(workers: int, gpus: int, share: float) -> None:
    options = worker_options([node(resources={"GPU": gpus})], Role.DECODE, worker_count=workers, wants_gpu=True)
    assert options["num_gpus"] == share
    workers_per_gpu = 1 if share == 1 else round(1 / share)
    assert workers_per_gpu * gpus >= workers


def test_a_paced_model_needs_no_gpu() -> None:
    assert "num_gpus" not in worker_options([node(resources={"GPU": 1})], Role.DECODE, worker_count=1, wants_gpu=False)


def test_dead_nodes_are_left_out() -> None:
    records = [
        {"NodeID": "a", "NodeManagerAddress": "1", "Alive": False, "Resources": {"node:__internal_head__": 1.0}},
        {"NodeID": "b", "NodeManagerAddress": "2", "Alive": True, "Resources": {}, "Labels": {"role": "decode"}},
        {"NodeID": "c", "NodeManagerAddress": "3", "Alive": True, "Resources": {"node:__internal_head__": 1.0}},
    ]
    assert [living.node_id for living in nodes_from_ray(records)] == ["b", "c"]
