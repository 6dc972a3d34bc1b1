"""Latency and rate of pages from each peer, as measured."""

from __future__ import annotations

import pytest

from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import decode, prefill, prompt_of
from twostroke.base.ids import WorkerId
from twostroke.worker.measured.link_rates import FORGET_S, MOST_PEERS, LinkRates

P0, P1 = WorkerId("prefill-0"), WorkerId("prefill-1")


def test_large_transfers_say_more_about_the_rate_than_small_ones() -> None:
    links = LinkRates()
    for _ in range(100):
        links.copied(P0, 10_000_000, 0.01, now_s=0)
        links.copied(P0, 1000, 0.0001, now_s=0)
    assert links.known(0)[P0].bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_one_transfer_that_stalled_hardly_counts_and_a_slower_link_is_learned() -> None:
    links = LinkRates()
    for _ in range(50):
        links.copied(P0, 10**6, 0.001, now_s=0)
    links.copied(P0, 10**6, 5.0, now_s=0)
    assert links.known(0)[P0].bytes_per_s > 0.7e9
    for _ in range(50):
        links.copied(P0, 10**6, 0.01, now_s=0)
    assert links.known(0)[P0].bytes_per_s == pytest.approx(1e8, rel=0.05)


def test_the_latency_is_the_links_and_not_that_of_a_queue_at_its_end() -> None:
    links = LinkRates()
    links.copied(P0, 1000, 0.001, now_s=0)
    for waited_s in [0.0, 0.0, 1.0, 0.0, 2.0] * 20:
        links.answered(P0, 0.002 + waited_s, now_s=0)
    assert links.known(0)[P0].latency_s == pytest.approx(0.002, rel=0.5)


def test_each_peer_has_a_link_of_its_own_and_one_without_a_rate_is_not_told() -> None:
    links = LinkRates()
    links.copied(P0, 1000, 0.001, now_s=0)
    links.answered(P1, 0.002, now_s=0)
    assert list(links.known(0)) == [P0]


def test_nothing_is_learned_from_a_transfer_of_nothing() -> None:
    links = LinkRates()
    links.copied(P0, 0, 0.001, now_s=0)
    links.copied(P0, 1000, 0.0, now_s=0)
    assert not links.known(0)


def test_peers_that_are_gone_for_long_are_forgotten() -> None:
    links = LinkRates()
    links.copied(P0, 1000, 0.001, now_s=0)
    links.copied(P1, 1000, 0.001, now_s=FORGET_S / 2)
    assert list(links.known(FORGET_S)) == [P1]


def test_of_very_many_peers_the_last_ones_are_kept() -> None:
    links = LinkRates()
    for number in range(MOST_PEERS + 10):
        links.copied(WorkerId(str(number)), 1000, 0.001, now_s=0)
        links.copied(P0, 1000, 0.001, now_s=0)
    assert len(links.known(0)) == MOST_PEERS
    assert {P0, WorkerId(str(MOST_PEERS + 9))} <= set(links.known(0))


async def test_pulls_measure_the_link_and_the_load_report_tells() -> None:
    prompt = prompt_of(400)
    async with prefill() as source, decode() as target, router_to(target) as router:
        await router.answer(prompt, 2, source=source)
        (link,) = target.host.load_report().links
        assert (link.worker_id, link.latency_s) == ("prefill-0", 0.0), "its source had to compute first"
        assert link.bytes_per_s > 0
        async with decode("decode-1") as other, router_to(other) as second:
            await second.answer(prompt, 2, source=source)
            assert 0 < other.host.load_report().links[0].latency_s < 5
