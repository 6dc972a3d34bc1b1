"""Some of the hostile clients, for a moment each; `make neighbours` plays all of them for as long as it is told.

Other work on the machine makes answers late as well. So a median is compared with one of the same run, with room, and a
client that seems to be in the way is played again before that counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.neighbours.entries import ENTRIES
from tests.chaos.neighbours.site import Site, serving
from tests.chaos.neighbours.trial import HostileProcess, Trial, answers, hostile_process, percentile, trial

MOMENT_S = 1.0
MOST_TIMES = 5.0
SLACK_S = 0.1
PLAIN = (
    "one byte chunks of a refused request",
    "endless heads",
    "long stop strings",
    "large messages at workers",
    "forged request ids",
)
SECURED = ("garbage at worker ports", "unfinished bodies", "a hundred watches", "highest priorities")


@pytest.mark.parametrize(("secured", "names"), [(False, PLAIN), (True, SECURED)], ids=["plain", "secured"])
async def test_an_honest_client_is_served_beside_hostile_ones(
    tmp_path: Path, secured: bool, names: tuple[str, ...]
) -> None:
    async with serving(tmp_path, secured=secured) as site, hostile_process(site) as hostile:
        for name in names:
            assert not await wrong(site, hostile, name) or not (again := await wrong(site, hostile, name)), again


async def wrong(site: Site, hostile: HostileProcess, name: str) -> list[str]:
    """What was not as it must be beside that one; a process that has died is not to be tried again."""
    tried = await trial(site, hostile, name, MOMENT_S, 1, MOMENT_S)
    assert not site.dead(), f"{name}: {tried.left}\n{site.last_words()}"
    assert tried.sent, f"{name} did nothing"
    said = [*tried.left, *tried.seen.errors[:3]]
    if is_late(tried):
        said.append(f"the median answer took {percentile(answers(tried.seen), 0.5):.3f} s")
    return [f"{name}: {each}" for each in said]


def is_late(tried: Trial) -> bool:
    usual_s = percentile(answers(tried.baseline), 0.5)
    return percentile(answers(tried.seen), 0.5) > MOST_TIMES * usual_s + SLACK_S


def test_every_entry_says_what_it_sends_and_none_is_there_twice() -> None:
    assert len(ENTRIES) > 100
    for name, entry in ENTRIES.items():
        assert entry.what.endswith("."), name
        assert entry.port, name
