"""The benchmark of starts sees every process of a server that runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cluster.served import SMALL
from tests.trials.bench.__main__ import PROGRAM
from tests.trials.bench.startup.measure import memory_bytes
from twostroke.kv_cache.memory import PageMemory


@pytest.mark.slow
def test_all_processes_are_counted_from_the_first_start(tmp_path: Path) -> None:
    told = tmp_path / "startup.json"
    flags = ["--rounds", "1", "--pause", "0", "--idle", "0.5", "--serve", " ".join(SMALL)]
    assert PROGRAM.main(["startup", *flags, "--json", str(told)]) == 0
    (start,) = json.loads(told.read_text())["rounds"]
    titles = [process["title"] for process in start["processes"]]
    assert {"tools.cli", "router", "raylet", "gcs_server"} <= set(titles)
    assert sum(title.startswith("ray::") for title in titles) == 3, "a supervisor and two workers"
    assert start["ready_s"] > 0
    assert all(process["own_mb"] > 0 for process in start["processes"])


def test_page_pools_do_not_count_as_memory_of_a_process() -> None:
    own, pools = memory_bytes(os.getpid())
    memory = PageMemory(64, 1 << 20)
    memory.data[:] = 1
    own_now, pools_now = memory_bytes(os.getpid())
    assert pools_now - pools >= 64 << 20
    assert own_now - own < 32 << 20
    memory.close()
