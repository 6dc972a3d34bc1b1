"""What a key may use at several routers of one launcher: as much as at one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from router.auth import key_uses
from router.auth.api_keys import KeyEntry
from router.auth.key_uses import PLACES, KeyUses
from router.auth.limits import KeyLimits, OpenCall
from router.shared_memory import RouterMemory, create_router_memory
from twostroke.base.errors import RateLimitExceeded


@pytest.fixture
def descriptor() -> Iterator[int]:
    created = create_router_memory()
    yield created
    os.close(created)


def entry(**limits: float) -> KeyEntry:
    return KeyEntry(tenant="t", sha256="0" * 64, **limits)  # type: ignore[arg-type]  # the test's to get right


def router_of(descriptor: int) -> tuple[RouterMemory, KeyLimits]:
    memory = RouterMemory.inherited(descriptor)
    return memory, KeyLimits(KeyUses(memory))


def test_several_routers_let_in_what_one_would(descriptor: int) -> None:
    draws, alone = random.Random(3), KeyLimits()
    routers = [router_of(descriptor)[1] for _ in range(3)]
    keys = {
        "narrow": entry(concurrency=3),
        "slow": entry(requests_per_minute=40),
        "talkative": entry(tokens_per_minute=900, concurrency=5),
    }
    open_calls: list[tuple[OpenCall, OpenCall]] = []
    now_s, outcomes = 0.0, list[object]()
    for _ in range(3000):
        now_s += draws.expovariate(4.0)
        if open_calls and draws.random() < 0.45:
            pair = open_calls.pop(draws.randrange(len(open_calls)))
            tokens = draws.randrange(60)
            for call in pair:
                call.spend(tokens)
                call.leave()
            continue
        key_id, width = draws.choice(list(keys)), draws.choice((1, 1, 2))
        pair_or_none = [entered(limits, key_id, keys[key_id], now_s) for limits in (draws.choice(routers), alone)]
        assert type(pair_or_none[0]) is type(pair_or_none[1])
        outcomes.append(type(pair_or_none[0]))
        if not isinstance(pair_or_none[0], OpenCall):
            assert pair_or_none[0] == pair_or_none[1]
            continue
        calls = tuple(call for call in pair_or_none if isinstance(call, OpenCall))
        assert len({widened(call, width) for call in calls}) == 1
        open_calls.append((calls[0], calls[1]))
    assert 300 < outcomes.count(OpenCall) < len(outcomes) - 300, "some were let in, and some refused"


def entered(limits: KeyLimits, key_id: str, allowed: KeyEntry, now_s: float) -> OpenCall | tuple[str, float | None]:
    try:
        return limits.enter(key_id, allowed, now_s)
    except RateLimitExceeded as refused:
        return refused.reason, refused.retry_after_s and round(refused.retry_after_s, 6)


def widened(call: OpenCall, width: int) -> bool:
    try:
        call.widen(width)
    except RateLimitExceeded:
        return False
    return True


def test_open_choices_of_a_router_that_died_are_forgotten_and_its_requests_are_not(descriptor: int) -> None:
    (dying, first), (_, second) = router_of(descriptor), router_of(descriptor)
    allowed = entry(concurrency=2, requests_per_minute=3)
    first.enter("a", allowed, 0.0)
    first.enter("a", allowed, 0.0)
    with pytest.raises(RateLimitExceeded, match="2 answers at once"):
        second.enter("a", allowed, 0.0)
    dying.close()
    second._uses._shared._alive_s.clear()  # as it is a moment later
    second.enter("a", allowed, 0.0)
    with pytest.raises(RateLimitExceeded, match="3 requests per minute"):
        second.enter("a", allowed, 0.0)


def test_a_router_that_is_started_anew_does_not_have_the_choices_of_the_one_before(descriptor: int) -> None:
    (dying, first), (_, second) = router_of(descriptor), router_of(descriptor)
    allowed = entry(concurrency=2)
    for _ in range(2):
        first.enter("a", allowed, 0.0)
    dying.close()
    memory, revived = router_of(descriptor)
    assert memory.number == dying.number
    second.enter("a", allowed, 0.0)
    revived.enter("a", allowed, 0.0)
    with pytest.raises(RateLimitExceeded):
        second.enter("a", allowed, 0.0)


def test_more_keys_than_places_push_out_none_that_is_open(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_uses, "ROWS", 2)
    _, limits = router_of(descriptor)
    allowed = entry(concurrency=1)
    held = limits.enter("held", allowed, 0.0)
    for number in range(3 * 2 * PLACES):
        limits.enter(f"key-{number}", allowed, 1.0).leave()
    with pytest.raises(RateLimitExceeded):
        limits.enter("held", allowed, 2.0)
    held.leave()
    limits.enter("held", allowed, 2.0)


_RUSH = """
import sys
from router.auth.api_keys import KeyEntry
from router.auth.key_uses import KeyUses
from router.auth.limits import KeyLimits
from router.shared_memory import RouterMemory
from twostroke.base.errors import RateLimitExceeded
limits = KeyLimits(KeyUses(RouterMemory.inherited(int(sys.argv[1]))))
allowed, let_in = KeyEntry(tenant="t", sha256="0" * 64, concurrency=500), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(2000):
    try:
        limits.enter("a", allowed, 0.0)
        let_in += 1
    except RateLimitExceeded:
        pass
print(let_in, flush=True)
sys.stdin.readline()
"""


def test_processes_that_rush_in_at_once_let_in_exactly_as_many_as_may(descriptor: int) -> None:
    """Each keeps what it let in until all have counted."""
    command = [sys.executable, "-c", _RUSH, str(descriptor)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [descriptor]}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sum(int(process.stdout.readline()) for process in processes) == 500
    for process in processes:
        process.communicate("\n")
