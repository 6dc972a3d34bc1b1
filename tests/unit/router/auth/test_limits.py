"""How much a key may use, by a clock that the test turns."""

from __future__ import annotations

import random

import pytest

from router.auth.api_keys import KeyEntry
from router.auth.limits import KeyLimits
from twostroke.base.errors import InvalidRequest, RateLimitExceeded


def entry(**limits: float) -> KeyEntry:
    return KeyEntry(tenant="t", sha256="0" * 64, **limits)  # type: ignore[arg-type]  # the test's to get right


def test_a_minutes_worth_may_come_at_once_and_then_comes_back_evenly() -> None:
    limits, allowed = KeyLimits(), entry(requests_per_minute=6)
    for _ in range(6):
        limits.enter("a", allowed, 100.0).leave()
    with pytest.raises(RateLimitExceeded, match="6 requests per minute") as refused:
        limits.enter("a", allowed, 100.0)
    assert (refused.value.reason, refused.value.retry_after_s) == ("requests", pytest.approx(10.0))
    limits.enter("b", allowed, 100.0)
    limits.enter("a", allowed, 110.1)
    with pytest.raises(RateLimitExceeded):
        limits.enter("a", allowed, 110.1)


def test_tokens_used_beyond_the_limit_have_to_come_back_before_the_next_call() -> None:
    limits, allowed = KeyLimits(), entry(tokens_per_minute=60)
    use = limits.enter("a", allowed, 0.0)
    use.spend(50)
    limits.enter("a", allowed, 0.0).spend(100)
    with pytest.raises(RateLimitExceeded, match="60 tokens per minute") as refused:
        limits.enter("a", allowed, 0.0)
    assert (refused.value.reason, refused.value.retry_after_s) == ("tokens", pytest.approx(90.0))
    limits.enter("a", allowed, 90.1)


def test_one_token_beyond_the_limit_has_to_come_back_too() -> None:
    limits, allowed = KeyLimits(), entry(tokens_per_minute=60)
    limits.enter("a", allowed, 0.0).spend(61)
    with pytest.raises(RateLimitExceeded):
        limits.enter("a", allowed, 0.9)
    limits.enter("a", allowed, 1.1)


def test_a_key_that_was_idle_saves_up_no_more_than_a_minutes_worth() -> None:
    limits, calls, tokens = KeyLimits(), entry(requests_per_minute=6), entry(tokens_per_minute=60)
    limits.enter("a", calls, 0.0).leave()
    for _ in range(6):
        limits.enter("a", calls, 3600.0).leave()
    with pytest.raises(RateLimitExceeded, match="6 requests per minute"):
        limits.enter("a", calls, 3600.0)
    limits.enter("b", tokens, 0.0).spend(1)
    limits.enter("b", tokens, 3600.0).spend(61)
    with pytest.raises(RateLimitExceeded, match="60 tokens per minute"):
        limits.enter("b", tokens, 3600.0)


def test_calls_at_once_are_counted_until_they_end_and_a_refused_one_counts_nowhere() -> None:
    limits, allowed = KeyLimits(), entry(concurrency=2, requests_per_minute=2)
    first, _ = limits.enter("a", allowed, 0.0), limits.enter("a", allowed, 0.0)
    for _ in range(3):
        with pytest.raises(RateLimitExceeded, match="2 answers at once"):
            limits.enter("a", allowed, 60.0)
    first.leave()
    limits.enter("a", allowed, 60.0)


def test_every_choice_of_every_prompt_counts_until_its_call_ends() -> None:
    limits, allowed = KeyLimits(), entry(concurrency=8)
    wide = limits.enter("a", allowed, 0.0)
    wide.widen(6)
    other = limits.enter("a", allowed, 0.0)
    with pytest.raises(RateLimitExceeded, match="8 answers at once"):
        other.widen(3)
    other.widen(2)
    with pytest.raises(RateLimitExceeded):
        limits.enter("a", allowed, 0.0)
    with pytest.raises(InvalidRequest, match=r"128 answers .* may have 8 at once"):
        other.widen(128)
    wide.leave()
    other.widen(8)
    other.leave()
    for _ in range(8):
        limits.enter("a", allowed, 0.0)


def test_within_any_minute_no_more_than_twice_the_limit_comes_in_and_in_the_long_run_the_limit_does() -> None:
    draws, limits, allowed = random.Random(1), KeyLimits(), entry(requests_per_minute=30)
    now_s, let_in, waits = 0.0, list[float](), list[float]()
    while now_s < 900:
        now_s += draws.expovariate(2.0)
        try:
            limits.enter("a", allowed, now_s).leave()
            let_in.append(now_s)
        except RateLimitExceeded as refused:
            waits.append(refused.retry_after_s or 0)
    assert 0 < min(waits) < max(waits) <= 2.0 + 1e-6
    assert max(sum(at - 60 < then <= at for then in let_in) for at in let_in) <= 60
    assert 30 * 14 <= len(let_in) <= 30 * 16


def test_a_limit_that_is_changed_counts_from_now() -> None:
    limits = KeyLimits()
    limits.enter("a", entry(requests_per_minute=1), 0.0).leave()
    limits.enter("a", entry(requests_per_minute=5), 0.0).leave()
    with pytest.raises(RateLimitExceeded):
        limits.enter("a", entry(requests_per_minute=2), 0.0)
