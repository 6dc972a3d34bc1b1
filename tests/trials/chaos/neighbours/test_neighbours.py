"""Some of the hostile clients, for a moment each; `make neighbours` plays all of them for as long as it is told.

How late answers are is measured there, where nothing else runs. Here each answer has to come, and nothing may be left.
What is left is looked at after a second trial as well, since other work on the machine delays what ends by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.chaos.neighbours.entries import ENTRIES
from tests.trials.chaos.neighbours.site import Site, serving
from tests.trials.chaos.neighbours.trial import HostileProcess, answers, hostile_process, trial

MOMENT_S = 1.0
PLAIN = ("one byte chunks of a refused request", "large messages at workers", "forged request ids")
SECURED = ("garbage at worker ports", "a hundred watches")
OTHERS = ("endless heads", "long stop strings"), ("unfinished bodies", "highest priorities")
"""Plain ones, and those of a server that is secured."""


@pytest.mark.parametrize(
    ("secured", "names"),
    [
        pytest.param(False, PLAIN, id="plain"),
        pytest.param(True, SECURED, id="secured"),
        *(
            pytest.param(secured, OTHERS[secured], id=f"others {secured}", marks=pytest.mark.slow)
            for secured in (False, True)
        ),
    ],
)
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
    assert answers(tried.seen), f"{name}: the honest client has no answer"
    return [f"{name}: {each}" for each in [*tried.left, *tried.seen.errors[:3]]]


def test_every_entry_says_what_it_sends_and_none_is_there_twice() -> None:
    assert len(ENTRIES) > 100
    for name, entry in ENTRIES.items():
        assert entry.what.endswith("."), name
        assert entry.port, name
