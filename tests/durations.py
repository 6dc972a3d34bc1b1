"""Does each folder of tests stay within its budget of processor time? The gate asks after its tests.

python -m tests.durations FILE ...           reads what `pytest --junitxml=FILE` wrote; exit status 1 beyond a budget
python -m tests.durations --write FILE ...   writes what these runs, which are the whole gate, took, and new budgets

`tests/durations.toml` holds what each folder has taken and the most that it may take: four times that, thirty seconds
at least. The whole gate may take twice as much. So much is left for a machine whose caches are empty: it compiles
kernels of Triton and Python's own modules, and packs weights, within the first tests that need them.

Seconds of a clock on the wall would fail on a machine that has other things to do, and then everybody would learn to
ignore the check. So seconds are those on the processor, of pytest and of the processes that tests start: waiting for
a turn costs none. A slower processor takes more of them for everything, so they are divided by what a loop that
never changes takes there, many times within the run (`tests/processor_time.py`). What remains, such as threads that
wait by spinning, polls of a test that waits longer and caches shared with neighbours, is far less than
that. A folder that grows slowly is seen in the file's diff, where the run is written, and in the budget of the whole.

The table also has the files that take longest by the clock, waits included. The gate begins with them, so that no
process of pytest still has a long file to do when the other one has none (`tests/conftest.py`).
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

TABLE = Path(__file__).with_name("durations.toml")
LEAST_BUDGET_S = 30.0
FOLDER_FACTOR = 4.0
WHOLE_FACTOR = 2.0
WHOLE = "the whole gate"
CLUSTERS = "tests/cluster/"
LONG_S = 5.0
"""Files that take less are begun last, in whatever order."""

HEADER = """\
# What each folder of tests takes of the processor, and the most that it may, in seconds of a processor that takes
# `loop_s` for the loop of tests/processor_time.py. Then the files that take longest, in seconds of the clock.
# Written by `python -m tests.durations --write FILE`.
"""


class Run(NamedTuple):
    loop_s: float
    """What the loop took within it, at the median."""
    folders: dict[str, float]
    """The seconds on the processor of each folder."""
    files: dict[str, float]
    """The seconds by the clock of each file, waits included."""


class Row(NamedTuple):
    seconds: float
    budget: float


class Table(NamedTuple):
    loop_s: float
    rows: dict[str, Row]
    longest: dict[str, float]
    """The seconds by the clock of files that take long."""


def read_run(*junits: str) -> Run:
    """Raises ValueError where the run has noted no times."""
    loops: list[float] = []
    folders: dict[str, float] = defaultdict(float)
    files: dict[str, float] = {}
    for case in (case for junit in junits for case in ElementTree.fromstring(junit).iter("testcase")):
        noted = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        if "processor_s" in noted:
            loops.append(float(noted["loop_s"]))
            folders[noted["file"].rpartition("/")[0]] += float(noted["processor_s"])
            files[noted["file"]] = float(noted["clock_s"])
    if not loops:
        raise ValueError("no test of this run has noted what it took")
    return Run(statistics.median(loops), dict(folders), files)


def table_of(run: Run) -> Table:
    rows = {folder: Row(round(taken_s, 1), _budget(taken_s)) for folder, taken_s in sorted(run.folders.items())}
    taken_s = sum(run.folders.values())
    longest = {file: round(clock_s, 1) for file, clock_s in sorted(run.files.items()) if clock_s >= LONG_S}
    return Table(run.loop_s, {WHOLE: Row(round(taken_s, 1), math.ceil(taken_s * WHOLE_FACTOR)), **rows}, longest)


def written(table: Table) -> str:
    rows = [
        f'"{name}" = {{ seconds = {row.seconds}, budget = {row.budget:.0f} }}\n' for name, row in table.rows.items()
    ]
    longest = [f'"{file}" = {clock_s}\n' for file, clock_s in table.longest.items()]
    return f"{HEADER}loop_s = {table.loop_s:.5f}\n\n[folders]\n{''.join(rows)}\n[longest]\n{''.join(longest)}"


def read_table(text: str) -> Table:
    held = tomllib.loads(text)
    rows = {name: Row(row["seconds"], row["budget"]) for name, row in held["folders"].items()}
    return Table(held["loop_s"], rows, held["longest"])


def places(table: Table) -> dict[str, int]:
    """Returns the place of each long file in the gate, the longest one first.

    Every other one is of a cluster as long as there are: its waits leave the processors to the one beside it.
    """
    longest = sorted(table.longest, key=lambda file: -table.longest[file])
    ways = [[file for file in longest if file.startswith(CLUSTERS) is is_cluster] for is_cluster in (True, False)]
    mixed = [file for pair in itertools.zip_longest(*ways) for file in pair if file is not None]
    return {file: place for place, file in enumerate(mixed)}


def exceeded(run: Run, table: Table) -> list[str]:
    """Returns a line for each folder, and for the whole, that takes more than its budget."""
    slowness = run.loop_s / table.loop_s
    taken = {WHOLE: sum(run.folders.values()), **run.folders}
    return [
        f"{name} takes {taken_s / slowness:.0f} s of the processor, and its budget is {budget_s:.0f} s"
        for name, taken_s in taken.items()
        if taken_s / slowness > (budget_s := _allowed(name, table.rows))
    ]


def _allowed(name: str, rows: Mapping[str, Row]) -> float:
    """A folder without a row has the least budget."""
    return rows[name].budget if name in rows else LEAST_BUDGET_S


def _budget(taken_s: float) -> float:
    return max(LEAST_BUDGET_S, math.ceil(taken_s * FOLDER_FACTOR))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args(argv)
    run = read_run(*(file.read_text() for file in arguments.files))
    if arguments.write:
        TABLE.write_text(written(table_of(run)))
        return 0
    lines = exceeded(run, read_table(TABLE.read_text()))
    print("\n".join(lines) or "every folder of tests stays within its budget")
    if lines:
        print("Make them quicker, or write a new table if they are worth it: python -m tests.durations --help")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
