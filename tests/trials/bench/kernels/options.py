"""The flags of `tests.trials.bench kernels`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.flags.checks import file_can_be_made, positive
from twostroke.base.errors import ConfigError
from twostroke.config import DEFAULT_MODEL, ModelConfig

Item = TypeVar("Item")

USUAL_PARTS = ("decode", "forms", "prefill", "linear", "step")
PARTS = (*USUAL_PARTS, "experts", "latents")
"""The last two have models of their own: they are timed where they are asked for."""
BEST = "best"
"""The value of `--kernels` that stands for what a worker would choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    model: ModelConfig
    threads: tuple[int, ...]
    kernels: tuple[str, ...]
    """`BEST`, names of native variants, "torch". Whether this CPU has them is found out where they are loaded."""
    parts: tuple[str, ...]
    repeats: int
    json_path: str | None

    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        for threads in self.threads:
            if not 1 <= threads <= cores:
                raise ConfigError(
                    f"--threads {threads}: this process may use {cores} cores, so 1 to {cores}", field="threads"
                )
        for part in self.parts:
            if part not in PARTS:
                raise ConfigError(f"--only {part}: the parts are {', '.join(PARTS)}", field="only")
        if self.model.is_paced:
            raise ConfigError("--model: a paced model computes nothing that could be timed", field="model")
        positive("--repeats", self.repeats)
        file_can_be_made("--json", self.json_path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose shapes are timed (default %(default)s)")
    parser.add_argument(
        "--dtype", default=ModelConfig().dtype, help="bfloat16, float16 or float32 (default %(default)s)"
    )
    parser.add_argument(
        "--weights", default=ModelConfig().weights, help="model: as they are; int8 (default %(default)s)"
    )
    parser.add_argument(
        "--threads", default="1", metavar="N,...", help="each is timed, with limits of its own (default %(default)s)"
    )
    parser.add_argument(
        "--kernels",
        default=BEST,
        metavar="NAME,...",
        help="avx512_bf16, avx2 and so on, as far as this CPU has them, or torch; best: what a worker would choose "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--only",
        default=",".join(USUAL_PARTS),
        metavar="PART,...",
        help=f"some of {', '.join(PARTS)} (default %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="of each timing (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> KernelOptions:
    return KernelOptions(
        model=ModelConfig(model=args.model, dtype=args.dtype, weights=args.weights, device="cpu"),
        threads=_listed("--threads", args.threads, int),
        kernels=_listed("--kernels", args.kernels, str),
        parts=_listed("--only", args.only, str),
        repeats=args.repeats,
        json_path=args.json,
    )


def _listed(flag: str, text: str, kind: Callable[[str], Item]) -> tuple[Item, ...]:
    """Each once, in the order given."""
    entries: Sequence[str] = [entry.strip() for entry in text.split(",")]
    try:
        found = tuple(dict.fromkeys(kind(entry) for entry in entries))
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: a list of numbers is wanted", field=flag.removeprefix("--")) from error
    if not all(entries):
        raise ConfigError(f"{flag} {text!r}: an entry is empty", field=flag.removeprefix("--"))
    return found
