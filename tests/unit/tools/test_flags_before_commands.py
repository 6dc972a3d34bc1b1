"""Flags are heard wherever they stand, and one that would change nothing is refused."""

from __future__ import annotations

import argparse

import pytest

from tools.cli import PROGRAM, main


def parsed(*words: str) -> argparse.Namespace:
    return PROGRAM.parser(words).parse_args(words)


@pytest.mark.parametrize("words", [("--seed", "5", "compare"), ("compare", "--seed", "5"), ("--seed=5", "compare")])
def test_a_flag_before_a_subcommand_is_the_subcommands(words: tuple[str, ...]) -> None:
    args = parsed("bench", *words, "http://a")
    assert (args.seed, args.urls) == (5, ["http://a"])
    assert args.rounds == 3


def test_the_later_of_two_is_meant_and_a_flag_that_is_needed_may_stand_before() -> None:
    args = parsed("simulate", "--slo-ttft", "3", "--seed", "1", "plan", "--slo-itl", "1", "--seed", "2")
    assert (args.slo_ttft, args.seed) == (3.0, 2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ("bench", "--num-requests", "5", "compare", "http://a"),
            "twostroke bench compare: unrecognized arguments: --num",
        ),
        (
            ("simulate", "--policies", "kv", "plan", "--slo-ttft", "9", "--slo-itl", "1"),
            "twostroke simulate plan: unrecognized arguments: --policies",
        ),
    ],
)
def test_a_flag_that_the_subcommand_does_not_know_is_no_silent_loss(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
    assert complaint in capsys.readouterr().err


def test_what_was_said_is_known_even_where_it_is_the_default() -> None:
    assert parsed("bench", "--arrivals", "poisson").flags_given == {"arrivals"}
    assert parsed("bench", "--no-stream", "--rate=2").flags_given == {"stream", "rate"}
    assert parsed("bench", "--seed", "0", "compare", "http://a", "--rounds", "3").flags_given == {"seed", "rounds"}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--trace-scale", "2"), "--trace-scale would be ignored: it needs --trace"),
        (("--trace", "x", "--num-requests", "100"), "--num-requests would be ignored: --trace replaces it"),
        (("--trace", "x", "--rate", "1", "--trace-jitter", "1"), "--trace-jitter would be ignored: --rate and"),
        (("--arrivals", "poisson"), "--arrivals would be ignored: it needs --rate"),
        (("--grpc", "127.0.0.1:1", "--url", "http://a"), "--url would be ignored: --grpc replaces it"),
        (("--url", "http://a", "--pid", "1"), "--pid would be ignored: it names this user's own server"),
        (("--prefix-groups", "2"), "--prefix-groups would be ignored: it needs --shared-prefix-tokens"),
    ],
)
def test_a_flag_of_bench_that_would_change_nothing_is_refused(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert complaint in capsys.readouterr().err
