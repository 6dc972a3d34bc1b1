"""Time until `serve` is ready, then processor time and memory of all its processes while nobody asks."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests import process_table
from tests.cluster.served import Server, starting
from tests.trials.bench.startup.options import StartupOptions
from tools.output import write_json
from twostroke.base.errors import PeerLost
from twostroke.models.catalog.places import cache_dir

POOLS = "/memfd:twostroke-pages"
"""Name of page pools among a process's mappings."""
PATIENCE_S = 300.0
LOOK_S = 0.02
READ_FILES = ("digests", "specs")
"""Folders beside the models: what an earlier start has kept about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCost:
    """Costs of one process."""

    title: str
    start_s: float
    """Processor time until the cluster was ready, and a pause later."""
    idle_percent: float
    """Share of a core while nobody asks."""
    own_mb: float
    """Proportional share of memory (PSS), in 10^6 bytes, without page pools."""
    pool_mb: float
    """The same of page pools, as far as they were touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    ready_s: float
    processes: tuple[ProcessCost, ...]

    def total(self, name: str) -> float:
        return float(sum(getattr(process, name) for process in self.processes))


def run_session(options: StartupOptions) -> int:
    rounds = [_measure(options) for _ in range(options.rounds)]
    Console(stderr=options.json_path == STDOUT).print(_table(options, rounds))
    content = {"schema_version": 1, "options": options.model_dump(), "rounds": [asdict(each) for each in rounds]}
    write_json(content, options.json_path)
    return 0


def _measure(options: StartupOptions) -> Startup:
    with tempfile.TemporaryDirectory(prefix="startup-") as folder, contextlib.ExitStack() as stack:
        cache = _fresh_cache(Path(folder)) if options.first else cache_dir()
        began_s = time.monotonic()
        # torch makes a folder for what it compiles, beside the files of the server, which must leave none.
        compiled = f"{folder}/inductor"
        serving = starting(
            Path(folder), *shlex.split(options.serve), TWOSTROKE_CACHE=str(cache), TORCHINDUCTOR_CACHE_DIR=compiled
        )
        server = stack.enter_context(serving)
        _until_ready(server)
        ready_s = time.monotonic() - began_s
        time.sleep(options.pause)
        return Startup(ready_s=ready_s, processes=tuple(_costs(server.processes(), options.idle)))


def _until_ready(server: Server) -> None:
    """Raises PeerLost where the server ends before, or takes longer than compilers ever take."""
    until_s = time.monotonic() + PATIENCE_S
    while "ready after" not in server.printed:
        if server.process.poll() is not None or time.monotonic() > until_s:
            raise PeerLost(f"the server is not ready:\n{server.printed}")
        time.sleep(LOOK_S)


def _fresh_cache(folder: Path) -> Path:
    """Returns a cache with all models, and nothing that was made of them."""
    models = folder / "cache" / "models"
    models.mkdir(parents=True)
    for model in (cache_dir() / "models").iterdir():
        if model.name not in READ_FILES:
            (models / model.name).symlink_to(model)
    return folder / "cache"


def _costs(processes: Sequence[psutil.Process], seconds: float) -> Iterator[ProcessCost]:
    before, began_s = {process.pid: _seconds(process) for process in processes}, time.monotonic()
    time.sleep(seconds)
    spent = {process.pid: _seconds(process) - before[process.pid] for process in processes}
    elapsed_s = time.monotonic() - began_s
    for process in processes:
        own, pools = memory_bytes(process.pid)
        yield ProcessCost(
            title=_title(process),
            start_s=before[process.pid],
            idle_percent=100 * spent[process.pid] / elapsed_s,
            own_mb=own / 1e6,
            pool_mb=pools / 1e6,
        )


def _seconds(process: psutil.Process) -> float:
    """Returns its processor time, to the nanosecond: an idle process takes few ticks of the clock."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory_bytes(pid: int) -> tuple[int, int]:
    """Returns the proportional share of memory of a process, and that of page pools, which the first does not hold."""
    own, pools, is_pool = 0, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name = line.split(maxsplit=1)[0]
        if not name.endswith(":"):
            is_pool = POOLS in line
        elif name == "Pss:":
            count = int(line.split()[1]) * 1024
            own, pools = own + count * (not is_pool), pools + count * is_pool
    return own, pools


def _title(process: psutil.Process) -> str:
    """Returns the module or script that it runs, or else its program."""
    words = process_table.title_of(process).split()
    program = os.path.basename(words[0])
    if not program.startswith("python"):
        return program
    module = next((after for flag, after in itertools.pairwise(words) if flag == "-m"), None)
    return module or os.path.basename(next((word for word in words if word.endswith(".py")), program))


def _table(options: StartupOptions, rounds: Sequence[Startup]) -> Table:
    kind = "first start" if options.first else "warm start"
    ready = statistics.median(each.ready_s for each in rounds)
    slowest = max(each.ready_s for each in rounds)
    table = Table(title=f"{kind}, median of {len(rounds)}: ready after {ready:.1f} s (at most {slowest:.1f} s)")
    table.add_column("process")
    for column in ("processor time to start, s", "idle, % of a core", "memory beside pools, MB", "pools, MB"):
        table.add_column(column, justify="right")
    names = ("start_s", "idle_percent", "own_mb", "pool_mb")
    last = rounds[-1]
    for process in sorted(last.processes, key=lambda each: -each.start_s):
        table.add_row(process.title, *(f"{getattr(process, name):.2f}" for name in names))
    table.add_section()
    medians = [statistics.median(each.total(name) for each in rounds) for name in names]
    table.add_row("all, median", *(f"{value:.2f}" for value in medians))
    return table
