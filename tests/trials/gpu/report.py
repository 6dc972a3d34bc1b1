"""What the GPU bench has found out: sections that fail alone, a short table last, JSON beside it."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

BUDGET_S = 450.0
"""For the whole run; cases that would start later are left out, and said to be."""


@dataclass(frozen=True)
class Row:
    what: str
    measured: str
    share: float | None = None
    """The share of the ceiling or floor that `wanted` speaks of."""
    wanted: str = ""
    passed: bool | None = None
    """None where nothing was asked."""


@dataclass
class Report:
    started_s: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    """What later sections compare with."""
    wanted: tuple[str, ...] = ()
    """How the names of sections begin that are to run; empty for all."""
    is_rehearsal: bool = False
    """Whether only errors matter: figures of toy sizes mean nothing."""

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.started_s > BUDGET_S

    def section(self, name: str, body: Callable[[Report], Iterator[Row]], *, is_needed: bool = False) -> None:
        """Rows as they come; what goes wrong ends this section alone. `is_needed`: by others."""
        if self.wanted and not is_needed and not name.startswith(self.wanted):
            self.not_run.append(f"{name}: not asked for")
            return
        began_s = time.monotonic()
        print(f"--- {name}", flush=True)
        try:
            for row in body(self):
                self.rows.append(row)
                print(f"{row.what}: rehearsed" if self.is_rehearsal else _line(row), flush=True)
                if self.is_late:
                    self.failures.append(f"{name}: out of time, the rest of it was not run")
                    break
        except Exception as error:  # whatever it is, the other sections still have something to say
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error).strip()[:300]}")
        print(f"    {time.monotonic() - began_s:.1f} s", flush=True)

    @property
    def exit_code(self) -> int:
        return 1 if self.failures or any(row.passed is False for row in self.rows) else 0

    def print_table(self, title: str) -> None:
        print(f"\n=== {title}")
        for row in self.rows:
            print(_line(row))
        for failure in self.failures:
            print(f"FAILED   {failure}")
        for name in self.not_run:
            print(f"NOT RUN  {name}")
        took_s = time.monotonic() - self.started_s
        print(f"=== {'FAIL' if self.exit_code else 'ok'} in {took_s:.0f} s", flush=True)

    def write_json(self, path: Path, environment: dict[str, str]) -> None:
        rows = [asdict(row) | {"share": _finite(row.share)} for row in self.rows]
        facts = {"environment": environment, "rows": rows, "failures": self.failures, "not_run": self.not_run}
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.3f}"
    verdict = {None: "", True: "ok", False: "FAIL"}[row.passed]
    return f"{row.what:<44} {row.measured:>26} {share:>7} {row.wanted:<12} {verdict}".rstrip()


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
