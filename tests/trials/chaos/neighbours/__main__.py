"""All hostile clients in random order for as long as told: `python -m tests.trials.chaos.neighbours --for 30m --seed
3`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.trials.chaos.neighbours.entries import ENTRIES
from tests.trials.chaos.neighbours.honest import Seen
from tests.trials.chaos.neighbours.report import Row, as_json, as_table, row_of
from tests.trials.chaos.neighbours.site import Died, serving
from tests.trials.chaos.neighbours.trial import baseline, hostile_process, trial
from tests.trials.chaos.program import seconds

SITES = {"plain": False, "secured": True}
BASELINE_S = 2.0
WARM_S = 4.0


async def play(
    site_name: str, names: list[str], until_s: float, seconds: float, seed: int, out: Path | None
) -> list[Row]:
    """`names` in this order, each on a server that has served those before it."""
    rows: list[Row] = []
    left = list(names)
    while left and time.monotonic() < until_s:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Died):
            async with serving(Path(folder), secured=SITES[site_name]) as site, hostile_process(site) as hostile:
                baselines: list[Seen] = [await baseline(site, hostile, WARM_S)]
                while left and time.monotonic() < until_s:
                    name = left.pop(0)
                    tried = await trial(site, hostile, name, seconds, seed, BASELINE_S)
                    baselines.append(tried.baseline)
                    row = row_of(site_name, tried, baselines)
                    rows.append(row)
                    _tell(row, out)
                    if site.dead():
                        break
    return rows


def _tell(row: Row, out: Path | None) -> None:
    print(f"{row.site:8} {row.entry:45} {row.sent:>7} p99 {row.p99_ms:>7} of {row.base_p99_ms:>6} "
          f"live {row.live_p99_ms:>7} {row.more_mb:>6} MB  {'; '.join(row.misses)[:160]}", flush=True)  # fmt: skip
    if out is not None:
        with out.open("a") as file:
            file.write(as_json([row]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.chaos.neighbours", description=__doc__)
    parser.add_argument("--for", dest="seconds", type=seconds, default=600.0, help="in all: 90s, 30m, 1h")
    parser.add_argument("--each", type=seconds, default=6.0, help="seconds of each hostile client")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries, by a part of their names")
    parser.add_argument("--site", nargs="+", choices=list(SITES), default=list(SITES))
    parser.add_argument("--json", type=Path, help="file to which a line is appended for each trial")
    parser.add_argument("--table", type=Path, help="file for the table, in Markdown")
    wanted = parser.parse_args()
    names = [name for name in ENTRIES if not wanted.only or any(part in name for part in wanted.only)]
    print(f"{len(names)} hostile clients, {wanted.seconds:.0f} s in all, seed {wanted.seed}", flush=True)
    rows = asyncio.run(_rounds(wanted, names))
    table = as_table(rows)
    if wanted.table is not None:
        wanted.table.write_text(table + "\n")
    failed = [row for row in rows if not row.is_good]
    print(f"\n{table}\n\n{len(rows)} trials, {len(failed)} of them not as they must be")
    return 1 if failed else 0


async def _rounds(wanted: argparse.Namespace, names: list[str]) -> list[Row]:
    draw, rows, begun_s = random.Random(wanted.seed), [], time.monotonic()
    while time.monotonic() < begun_s + wanted.seconds:
        for site in wanted.site:
            order = draw.sample(names, len(names))
            rows += await play(site, order, begun_s + wanted.seconds, wanted.each, draw.randrange(1 << 30), wanted.json)
    return rows


if __name__ == "__main__":
    sys.exit(main())
