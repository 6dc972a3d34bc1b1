"""What the programs that break a cluster have in common: the cluster's and the report's flags, times, and the start."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.cli import status_of
from cluster.flags.checks import file_can_be_made, positive
from cluster.flags.parser import Parser
from tests.trials.chaos import page_section
from tests.trials.chaos.injection.plan import BREAK, SURE_DRAFTS
from tools.output import write_json
from twostroke.config import DRAFTER_NAMES, PACED_PREFIX, SPECULATE_AUTO, SPECULATE_OFF

MODEL = "paced:step_ms=10,prefill_tokens_per_s=4000,max_model_len=1024,page_bytes=128,eos=1"
"""Pages have room for their tokens' hashes and no more: every bit of them counts."""
PACED_MEMORY = "10K"
"""80 pages: some streams fill it. The longest request takes 64, so pins may keep 16."""
REAL_MEMORY = "64M"
PATIENCE_S, REAL_PATIENCE_S = 3.0, 6.0
"""A client that goes away too early has all computed again."""

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def run_program(
    name: str,
    description: str,
    epilog: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    session: Callable[[argparse.Namespace], int],
) -> int:
    """Returns the session's exit status: 1 on any miss, 2 for wrong flags and for a cluster that does not start."""
    parser = Parser(
        prog=f"python -m tests.trials.chaos.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return status_of(lambda: session(parser.parse_args()), parser.prog)


def seconds(text: str) -> float:
    """Reads "90s", "10m" or "1.5h"; a bare number is seconds."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if matched is None:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}; write for example 90s, 10m, 1h")
    return float(matched[1]) * _UNITS_S[matched[2] or "s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The cluster that is broken, its clients, and where its logs are kept."""

    seed: int
    model: str
    dtype: str
    patience_s: float
    logs: Path | None
    breaks: str | None = None
    """Name of the guard that is off."""
    ranks: int = 1
    """The ranks of each worker; where there are several, only faults of ranks are tried."""
    memory: str | None = None
    """The memory of each worker's pages; None for as much as some streams fill."""
    speculate: str = SPECULATE_AUTO
    draft_model: str | None = None
    is_small: bool = False
    """Prompts of the model cost so little that prefill workers would get none: they compute all of them, in turns."""

    def __post_init__(self) -> None:
        positive("--client-timeout", self.patience_s)

    @property
    def is_paced(self) -> bool:
        return self.model.startswith(PACED_PREFIX)

    @property
    def model_flags(self) -> list[str]:
        """Returns what is served, and how, but for its number format."""
        ranks = ["--tp", str(self.ranks)] if self.ranks > 1 else []
        speculate = ["--speculate", self.speculate] if self.speculate != SPECULATE_AUTO else []
        draft_model = ["--draft-model", self.draft_model] if self.draft_model is not None else []
        travel = ["--policy", "round-robin", "--no-local-prefill"] if self.is_small else []
        return [self.model, *ranks, *speculate, *draft_model, *travel]

    @property
    def environment(self) -> dict[str, str]:
        breaks = {} if self.breaks is None else {BREAK: self.breaks}
        return breaks if self.draft_model is None else {**breaks, SURE_DRAFTS: "1"}

    def flags(self, transports: str) -> list[str]:
        """Returns the flags of `serve`."""
        own = ["--transports", transports] if transports else []
        memory = self.memory or (PACED_MEMORY if self.is_paced else REAL_MEMORY)
        tools = ["--tool-call-parser", "hermes"]  # some requests call tools
        return ["--model", *self.model_flags, "--dtype", self.dtype, "--kv-cache-memory", memory, *tools, *own]


def add_cluster_arguments(parser: argparse.ArgumentParser, *, seed: str) -> None:
    """`seed` says what is drawn from the seed."""
    parser.add_argument("--seed", type=int, default=1, help=f"{seed} (default: %(default)s)")
    parser.add_argument("--model", default=MODEL, help="as `serve --model` (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="as `serve --dtype` (default: %(default)s)")
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="RANKS",
        help="as `serve --tp`: kill, freeze and cut off first and last ranks",
    )
    parser.add_argument(
        "--kv-cache-memory",
        metavar="SIZE",
        help=f"as `serve --kv-cache-memory` (default: {PACED_MEMORY}, with a real model {REAL_MEMORY})",
    )
    parser.add_argument(
        "--speculate",
        choices=(SPECULATE_OFF, SPECULATE_AUTO, *DRAFTER_NAMES),
        default=SPECULATE_AUTO,
        help="as `serve --speculate` (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-model", metavar="MODEL", help="as `serve --draft-model`; it draws at every step, whatever that costs"
    )
    parser.add_argument(
        "--small-model",
        action="store_true",
        help="prefill workers compute all prompts, in turns: decode workers compute those of a small model themselves",
    )
    parser.add_argument(
        "--client-timeout",
        type=seconds,
        metavar="TIME",
        help="for which clients wait for a silent router "
        f"(default: {PATIENCE_S:g} s, with a real model {REAL_PATIENCE_S:g} s)",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the logs of clusters in which something was wrong"
    )


def cluster_options(args: argparse.Namespace, breaks: str | None = None) -> ClusterOptions:
    usual_s = PATIENCE_S if args.model.startswith(PACED_PREFIX) else REAL_PATIENCE_S
    return ClusterOptions(
        seed=args.seed,
        model=args.model,
        dtype=args.dtype,
        patience_s=usual_s if args.client_timeout is None else args.client_timeout,
        logs=args.logs,
        breaks=breaks,
        ranks=args.tp,
        memory=args.kv_cache_memory,
        speculate=args.speculate,
        draft_model=args.draft_model,
        is_small=args.small_model,
    )


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The files that a run writes its results to."""

    json_path: str | None
    write: Path | None
    section: str
    """The section of the page that `write` names."""

    def __post_init__(self) -> None:
        file_can_be_made("--json", self.json_path)
        page_section.check(self.write, self.section)

    def tell(self, summary: str, document: dict[str, Any]) -> None:
        """Reports to people and programs, also of a run that was interrupted."""
        write_json(document, self.json_path)
        print(summary, file=sys.stderr, flush=True)

    def publish(self, text: str) -> None:
        """Puts the text into the page, if there is one."""
        if self.write is not None:
            page_section.put(self.write, self.section, text)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the report into it, as docs/faults.md")
