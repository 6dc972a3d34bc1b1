"""Actors are placed by labels, custom resources and GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cluster.values.placement import Node, gpus_of, nodes_from_ray, unplaceable, with_gpus, worker_options
from cluster.values.spec import fleet_spec
from twostroke.config import ClusterConfig, ModelConfig, Role, RoleConfig

ANY = RoleConfig()


def node(
    name: str = "n0", labels: Mapping[str, str] | None = None, resources: Mapping[str, float] | None = None
) -> Node:
    return Node(name, "10.0.0.1", labels or {}, resources or {})


def test_a_plain_node_is_asked_for_nothing_not_even_a_cpu_and_workers_are_spread() -> None:
    options = worker_options([node(resources={"CPU": 2})], Role.DECODE, ANY, worker_count=2, gpus_each=1)
    assert options == {"num_cpus": 0, "scheduling_strategy": "SPREAD"}


def test_where_nodes_carry_role_labels_the_own_role_is_preferred_and_any_other_accepted() -> None:
    options = worker_options([node(labels={"role": "prefill"})], Role.PREFILL, ANY, worker_count=2, gpus_each=0)
    assert options["label_selector"] == {"role": "prefill"}
    assert options["fallback_strategy"] == [{"label_selector": {"role": "!prefill"}}]


def test_a_custom_resource_is_asked_for_only_where_it_exists() -> None:
    nodes = [node(resources={"decode": 1})]
    assert "resources" in worker_options(nodes, Role.DECODE, ANY, worker_count=2, gpus_each=0)
    assert "resources" not in worker_options(nodes, Role.PREFILL, ANY, worker_count=2, gpus_each=0)


@pytest.mark.parametrize(("workers", "gpus", "share"), [(2, 2, 1), (1, 8, 1), (2, 1, 0.5), (5, 2, 1 / 3)])
def test_gpus_are_shared_out_so_that_every_worker_fits(workers: int, gpus: int, share: float) -> None:
    options = worker_options([node(resources={"GPU": gpus})], Role.DECODE, ANY, worker_count=workers, gpus_each=1)
    assert options["num_gpus"] == share
    workers_per_gpu = 1 if share == 1 else round(1 / share)
    assert workers_per_gpu * gpus >= workers


def test_a_worker_of_several_ranks_takes_a_gpu_for_each_or_no_worker_is_started() -> None:
    nodes = [node(resources={"GPU": 4}), node(resources={"GPU": 1})]
    options = worker_options(nodes, Role.DECODE, ANY, worker_count=9, gpus_each=2)
    assert options["num_gpus"] == 2
    wrong = unplaceable(nodes, Role.DECODE, with_gpus(nodes, ANY, 8), 1)
    assert wrong is not None
    assert wrong.why == "a decode worker asks for 8 GPU, and no node has more than 4"
    assert unplaceable(nodes, Role.DECODE, with_gpus(nodes, ANY, 2), 2) is None
    assert unplaceable(nodes, Role.DECODE, with_gpus(nodes, ANY, 2), 3) is not None
    asking = RoleConfig(num_gpus=1.0)
    assert with_gpus(nodes, asking, 2) is asking
    assert with_gpus([node()], ANY, 2) is ANY, "then CPUs compute"
    assert gpus_of(ModelConfig(tp=2, decode_tp=4), Role.DECODE) == 4
    assert gpus_of(ModelConfig(tp=2, device="cpu"), Role.DECODE) == 0


def test_a_paced_model_needs_no_gpu() -> None:
    assert "num_gpus" not in worker_options([node(resources={"GPU": 1})], Role.DECODE, ANY, worker_count=1, gpus_each=0)


def test_dead_nodes_are_left_out() -> None:
    records = [
        {"NodeID": "a", "NodeManagerAddress": "1", "Alive": False, "Resources": {"node:__internal_head__": 1.0}},
        {"NodeID": "b", "NodeManagerAddress": "2", "Alive": True, "Resources": {}, "Labels": {"role": "decode"}},
        {"NodeID": "c", "NodeManagerAddress": "3", "Alive": True, "Resources": {"node:__internal_head__": 1.0}},
    ]
    assert [living.node_id for living in nodes_from_ray(records)] == ["b", "c"]


def test_what_a_role_asks_for_is_asked_of_ray() -> None:
    asked = RoleConfig(
        num_cpus=2,
        num_gpus=0.5,
        memory_bytes=1 << 30,
        custom={"nvme": 1},
        labels={"zone": "a"},
        prefer_labels={"k": "!v"},
    )
    options = worker_options([node(labels={"role": "decode"})], Role.DECODE, asked, worker_count=9, gpus_each=1)
    assert options == {
        "num_cpus": 2,
        "num_gpus": 0.5,
        "memory": 1 << 30,
        "resources": {"nvme": 1},
        "label_selector": {"zone": "a", "k": "!v"},
        "fallback_strategy": [{"label_selector": {"zone": "a", "k": "v"}}],
    }


def test_labels_that_must_be_there_leave_no_way_out() -> None:
    asked = RoleConfig(labels={"role": "prefill"})
    options = worker_options([node(labels={"role": "decode"})], Role.PREFILL, asked, worker_count=1, gpus_each=0)
    assert options == {"num_cpus": 0, "scheduling_strategy": "SPREAD", "label_selector": {"role": "prefill"}}


NODES = [
    node("n0", {"role": "prefill", "zone": "a"}, {"GPU": 8, "CPU": 4}),
    node("n1", {"role": "decode"}, {"GPU": 1, "CPU": 16}),
]


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (RoleConfig(), 100),
        (RoleConfig(labels={"role": "prefill"}, num_gpus=8), 1),
        (RoleConfig(labels={"role": "in(prefill, decode)"}, num_gpus=1), 9),
        (RoleConfig(labels={"role": "!decode", "zone": "!in(b, c)"}, num_gpus=1 / 3), 24),
    ],
)
def test_what_fits_is_no_misfit(asked: RoleConfig, count: int) -> None:
    assert unplaceable(NODES, Role.PREFILL, asked, count) is None


@pytest.mark.parametrize(
    ("asked", "count", "key", "why"),
    [
        (RoleConfig(labels={"role": "prefil"}), 1, "labels.role", "role=prefil; nodes have decode, prefill"),
        (RoleConfig(labels={"disk": "fast"}), 1, "labels.disk", "no node has that label"),
        (
            RoleConfig(labels={"role": "decode", "zone": "a"}),
            1,
            "labels.zone",
            "no node for prefill workers has zone=a",
        ),
        (RoleConfig(num_gpus=9), 1, "resources.num_gpus", "asks for 9 GPU, and no node has more than 8"),
        (RoleConfig(num_gpus=8), 2, "resources.num_gpus", "nodes have room for 1"),
        (RoleConfig(labels={"role": "decode"}, num_gpus=2), 1, "resources.num_gpus", "no node has more than 1"),
        (RoleConfig(custom={"nvme": 1}), 1, "resources.nvme", "no node has more than 0"),
        (RoleConfig(memory_bytes=1 << 40), 1, "resources.memory", "no node has more than 0"),
    ],
)
def test_a_misfit_says_what_is_asked_and_what_there_is(asked: RoleConfig, count: int, key: str, why: str) -> None:
    found = unplaceable(NODES, Role.PREFILL, asked, count)
    assert found is not None
    assert found.key == key
    assert why in found.why


def test_workers_share_out_a_gpu_unless_they_have_several_ranks_with_gpus_of_their_own() -> None:
    config = ClusterConfig(prefill=1, decode=1, model=ModelConfig(decode_tp=2))
    prefill, decode = fleet_spec(config, token="", port=0).workers
    assert prefill.cache.device_share == config.cache.device_share / 2
    assert decode.cache.device_share == config.cache.device_share
