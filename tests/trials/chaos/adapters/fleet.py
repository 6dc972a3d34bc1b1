"""A served fleet of two prefill and two decode workers under churn, and what must hold when all adapters are gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests import metrics_page
from tests.cluster.served import PATIENCE_S, Server, starting
from tests.trials.chaos.adapters.calls import Calls
from tests.trials.chaos.adapters.churn import Churn, Seen

BASE: Final = "tiny"
KEPT: Final = 8
"""Adapters that a worker keeps: fewer than are served, so that some make room for others all the time."""
TOKEN: Final = "the-token-of-this-run-and-of-nobody-else"


@dataclass(frozen=True, slots=True)
class Counted:
    """What the workers counted that lived to the end."""

    loads: int
    load_s: float
    evictions: int
    failures: int


@contextmanager
def fleet(folder: Path, stage_folders: Path, *flags: str) -> Iterator[tuple[Server, Calls]]:
    """Returns when it serves."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    own = ["--served-model-name", BASE, "--prefill", "2", "--decode", "2", "--lora-dirs", str(stage_folders)]
    own += ["--allow-runtime-lora-updating", "--max-loras", str(KEPT), "--token-file", str(token)]
    with starting(folder, *own, *flags) as server:
        server.until_printed("Ctrl-C ends it")
        yield server, Calls(server.address("OpenAI HTTP"), TOKEN)


async def churned(server: Server, churn: Churn, seconds: float, *, kills: bool) -> tuple[Seen, Counted]:
    """Plays; then unloads all and waits until no worker holds anything. `kills`: one worker of each role dies."""

    async def kill() -> None:
        for role in ("DecodeActor", "PrefillActor"):
            await asyncio.sleep(seconds / 3)
            os.kill(await asyncio.to_thread(server.worker_pid, role), signal.SIGKILL)

    seen = await churn.play(seconds, kill if kills else None)
    await churn.unload_all()
    pages = await asyncio.to_thread(_quiet_workers, server)
    return seen, _counted(pages)


def _quiet_workers(server: Server) -> list[str]:
    """Returns the metrics addresses of the workers. Fails the run where one still holds an adapter after a while."""
    workers = json.loads(server.command("status", "--json"))["workers"]
    addresses = [worker["metrics_address"] for worker in workers if worker["metrics_address"]]
    give_up_s = time.monotonic() + PATIENCE_S
    for address in addresses:
        while metrics_page.total(address, "twostroke_adapters") > 0:
            assert time.monotonic() < give_up_s, f"{address} still holds an adapter that no name leads to"
            time.sleep(0.1)
    return addresses


def _counted(addresses: list[str]) -> Counted:
    def total(name: str) -> float:
        return sum(metrics_page.total(address, f"twostroke_adapter_{name}_total") for address in addresses)

    names = ("loads", "load_seconds", "evictions", "load_failures")
    loads, load_s, evictions, failures = (total(name) for name in names)
    return Counted(int(loads), load_s, int(evictions), int(failures))
