"""Pages that are spoilt on their way between two real workers: noticed, and made up for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trials.chaos.injection.injector import HIT, Injector
from tests.trials.chaos.injection.plan import Fault
from tests.trials.chaos.injection.product import injected
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import BLOCK, decode, expected_tokens, prefill, prompt_of
from twostroke.config import RuntimeConfig


@pytest.fixture
def armable(tmp_path: Path) -> Iterator[Injector]:
    """The injector of both workers and the router, which are in this process."""
    made = Injector("everybody", str(tmp_path / "journal"))
    with injected(made):
        yield made
    made.heal()
    made.links.close()


@pytest.mark.parametrize(
    ("transport", "fault", "failures"),
    [
        ("tcp", "pages.announcing:corrupt", 1),
        ("tcp", "transport.serving:truncate", 1),
        ("tcp", "transport.asking:duplicate", 1),
        ("shm", "pull.announced:corrupt", 1),
        ("tcp", "pull.announced:partition:1:0.2", 0),
        ("tcp", "transport.connecting:slow:1:0.2", 0),
    ],
)
async def test_what_a_link_does_to_pages_changes_no_token(
    transport: str, fault: str, failures: int, armable: Injector, tmp_path: Path
) -> None:
    async with (
        prefill(runtime=RuntimeConfig(transports=(transport,))) as source,
        decode(runtime=RuntimeConfig(transports=(transport,))) as target,
        router_to(target) as router,
    ):
        armable.arm(Fault.parse(fault))
        for seed in range(2):
            prompt = prompt_of(8 * BLOCK + 5, seed=seed)
            got = await router.answer(prompt, 5, source=source, request_id=str(seed))
            assert got.tokens == expected_tokens(prompt, 5)
        reasons = ("transfer_failed", "peer_lost")
        assert sum(target.metric("pull_failures_total", reason=reason) for reason in reasons) == failures
        assert target.metric("pull_bytes_total", transport=transport) > 0
        journal = (tmp_path / "journal").read_text()
        assert (journal.count(str(Fault.parse(fault))), journal.count(HIT)) == (1 + failures, failures)
