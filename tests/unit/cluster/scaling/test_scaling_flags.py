"""Flags of scaling: what they let happen, and what is wrong with them."""

from __future__ import annotations

import argparse

import pytest

from cluster.commands.serving import serve
from cluster.values.spec import fleet_spec
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, Role, RoleConfig


def config(*flags: str) -> ClusterConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.config_from(parser.parse_args(flags))


def test_without_room_between_the_bounds_nothing_scales_or_switches() -> None:
    spec = fleet_spec(config("--prefill", "2", "--decode", "2"), token="t", port=0)
    assert (spec.scales, spec.flexible) == (False, False)
    assert not any(worker.flexible for worker in spec.workers)


def test_room_for_both_roles_lets_workers_switch() -> None:
    one = fleet_spec(config("--max-decode", "3", "--slo-itl", "0.05"), token="t", port=0)
    assert (one.scales, one.flexible, one.promise.itl_s) == (True, False, 0.05)
    promised = fleet_spec(config("--slo-ttft", "3", "--slo-itl", "0.05"), token="t", port=0)
    assert {(worker.slo_ttft_s, worker.slo_itl_s) for worker in promised.workers} == {(3.0, 0.05)}
    both = fleet_spec(config("--max-decode", "3", "--max-prefill", "2"), token="t", port=0)
    assert both.flexible
    assert all(worker.flexible and worker.can_sample for worker in both.workers)


def test_a_worker_that_is_added_is_like_those_of_its_role_and_one_that_switches_stays_what_its_process_is() -> None:
    said = config("--prefill", "0", "--max-prefill", "1", "--max-decode", "2", "--threads", "4")
    spec = fleet_spec(said.replace(decode_role=RoleConfig(threads=2)), token="t", port=0)
    assert spec.worker("prefill-0", Role.PREFILL).runtime.threads == 4, "though none is there to be like"
    assert spec.worker("decode-1", Role.DECODE).runtime.threads == 2
    switched = spec.worker("decode-0", Role.PREFILL)
    assert (switched.role, switched.runtime.threads) == (Role.PREFILL, 2)


def test_without_prefill_workers_nothing_is_refused_for_them_and_one_that_is_added_is_as_decode_workers() -> None:
    said = ("--deterministic", "--decode-tp", "2", "--decode-kv-format", "int8")
    spec = fleet_spec(config("--prefill", "0", "--flexible", *said), token="t", port=0)
    added = spec.worker("prefill-0", Role.PREFILL)
    assert (added.ranks, added.kv_format) == (2, "int8/2")
    assert {worker.peer_kv_format for worker in spec.workers} == {"int8/2"}
    with pytest.raises(ConfigError, match="give both the same --tp and format, or leave --deterministic away"):
        config("--prefill", "0", "--max-prefill", "1", *said)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--max-decode", "0"), "--max-decode must be 1 or more"),
        (("--min-prefill", "-1"), "--min-prefill must be 0 or more"),
        (("--prefill", "3", "--max-prefill", "2"), "--min-prefill 3, --prefill 3, --max-prefill 2: the count must lie"),
        (
            ("--prefill", "0", "--prefill-tp", "2"),
            "--prefill-tp 2 would be ignored: --prefill 0 starts no prefill worker",
        ),
        (("--prefill", "0", "--prefill-kv-format", "int8"), "--prefill-kv-format int8 would be ignored: --prefill 0"),
        (("--slo-itl", "0"), "--slo-itl must be positive and finite"),
    ],
)
def test_bounds_that_cannot_be_are_refused_by_their_flags(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(*flags)
