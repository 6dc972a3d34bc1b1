"""Tries all schemas of a set, and prints or writes what became of them.

`python -m tests.trials.schemas --set ../shared/specs/json-schemas.jsonl.gz --write` writes the table of
docs/structured-output.md. Not zero where an answer violates its schema.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from tests.trials.schemas.bed import Bed, Tally, entries
from twostroke.config import DEFAULT_MODEL
from twostroke.models.catalog.fetch import fetch

PAGE = Path(__file__).parents[3] / "docs" / "structured-output.md"
BEGIN, END = "<!-- written by tests.trials.schemas -->\n", "<!-- end -->\n"
SAMPLE = Path(__file__).with_name("sample.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.schemas", description=__doc__)
    parser.add_argument("--set", dest="path", type=Path, default=SAMPLE)
    parser.add_argument("--walks", type=int, default=3, help="random answers for each schema that compiles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lenient", action="store_true", help="take formats that cannot be kept to as notes")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    wanted = parser.parse_args()
    bed = Bed(str(fetch(DEFAULT_MODEL, "float32", lambda stage, part: None)), wanted.seed)
    for entry in entries(wanted.path):
        bed.try_schema(entry, is_strict=not wanted.lenient, walks=wanted.walks)
    table = _table(bed.tally)
    print(table, *bed.tally.problems, sep="\n")
    if wanted.write:
        page = PAGE.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        PAGE.write_text(head + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")
    return 1 if bed.tally.problems else 0


def _table(tally: Tally) -> str:
    refused = sum(tally.refused.values())
    schemas = refused + tally.compiled
    masks = np.array(tally.mask_s) * 1e6
    compile_ms = np.array(tally.compile_s) * 1e3
    rows = [
        ("schemas", f"{schemas:,}"),
        ("compiled", f"{tally.compiled:,} ({tally.compiled / schemas:.1%})"),
        ("refused", f"{refused:,} ({refused / schemas:.1%})"),
        *((f"refused for `{cause}`", f"{count}") for cause, count in tally.refused.most_common()),
        ("instances marked valid, invalid", f"{tally.valid:,}, {tally.invalid:,}"),
        ("random answers, of which unfinished", f"{tally.walks:,}, {tally.unfinished:,}"),
        ("instances on the wrong side, and answers that violate their schema", f"{len(tally.problems)}"),
        ("to compile one, median and longest", f"{np.median(compile_ms):.1f} ms, {compile_ms.max():.0f} ms"),
        ("one mask, mean, p99", f"{masks.mean():.0f} µs, {np.percentile(masks, 99):.0f} µs"),
    ]
    return "| What | Found |\n|---|---|\n" + "".join(f"| {name} | {found} |\n" for name, found in rows)


if __name__ == "__main__":
    sys.exit(main())
