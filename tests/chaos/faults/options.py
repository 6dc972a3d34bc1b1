"""The flags of `faults`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from cluster.flags.checks import file_can_be_made, positive
from tests.chaos import page_section
from tests.chaos.injection.plan import Guard
from twostroke.config import PACED_PREFIX

MODEL = "paced:step_ms=10,prefill_tokens_per_s=4000,max_model_len=2048,page_bytes=128"
"""Pages have room for their tokens' hashes and no more: every bit of them counts."""
PACED_MEMORY = "10K"
"""80 pages: some streams fill it."""
REAL_MEMORY = "64M"
PATIENCE_S, REAL_PATIENCE_S = 3.0, 6.0
"""A client that goes away too early has all computed again."""
TRANSPORTS = ("tcp", "")
"""Transports of clusters, one after the other. Empty means the default, which on one host is shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsOptions:
    seed: int
    only: tuple[str, ...]
    quick: bool
    sample: int | None
    """So many faults are tried, drawn from all; None: all."""
    transports: tuple[str, ...]
    model: str
    dtype: str
    patience_s: float
    json_path: str | None
    write: Path | None
    breaks: str | None
    logs: Path | None

    def __post_init__(self) -> None:
        positive("--client-timeout", self.patience_s)
        if self.sample is not None:
            positive("--sample", self.sample)
        file_can_be_made("--json", self.json_path)
        page_section.check(self.write, self.section)

    @property
    def is_paced(self) -> bool:
        return is_paced(self.model)

    @property
    def section(self) -> str:
        """The section of the page that `write` names."""
        return page_section.MATRIX if self.is_paced else page_section.SAMPLE

    def flags(self, transports: str) -> list[str]:
        """Return the flags of `serve`."""
        own = ["--transports", transports] if transports else []
        memory = PACED_MEMORY if self.is_paced else REAL_MEMORY
        return ["--model", self.model, "--dtype", self.dtype, "--kv-cache-memory", memory, *own]


def is_paced(model: str) -> bool:
    return model.startswith(PACED_PREFIX)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of order and draws (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help='of "process/point/kind": "decode/pull.*/kill"'
    )
    parser.add_argument("--quick", action="store_true", help="one fault of each sort in each kind of process")
    parser.add_argument("--sample", type=int, metavar="N", help="so many, drawn from all")
    parser.add_argument(
        "--transports",
        action="append",
        metavar="NAMES",
        help='as `serve --transports`; "default": without it (default: most of the faults over tcp, a part without it)',
    )
    parser.add_argument("--model", default=MODEL, help="as `serve --model` (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="as `serve --dtype` (default: %(default)s)")
    parser.add_argument(
        "--client-timeout",
        type=float,
        metavar="SECONDS",
        help="for which clients wait for a silent router "
        f"(default: {PATIENCE_S:g}, with a real model {REAL_PATIENCE_S:g})",
    )
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into it, as docs/faults.md")
    parser.add_argument(
        "--break", dest="breaks", choices=[guard.value for guard in Guard], help="switch that off: it has to be noticed"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the logs of clusters in which something was wrong"
    )


def options_from(args: argparse.Namespace) -> FaultsOptions:
    usual_s = PATIENCE_S if is_paced(args.model) else REAL_PATIENCE_S
    asked = args.transports or list(TRANSPORTS)
    return FaultsOptions(
        seed=args.seed,
        only=tuple(args.only),
        quick=args.quick,
        sample=args.sample,
        transports=tuple("" if transports == "default" else transports for transports in asked),
        model=args.model,
        dtype=args.dtype,
        patience_s=usual_s if args.client_timeout is None else args.client_timeout,
        json_path=args.json,
        write=args.write,
        breaks=args.breaks,
        logs=args.logs,
    )
