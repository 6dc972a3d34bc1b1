"""The flags of `tests.trials.bench policies`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from cluster.flags.checks import file_can_be_made, positive
from router.routing.policies import POLICIES
from tools.simulate.options import RequestSource
from tools.simulate.variants import BASELINE, variants_from
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group

DEFAULT_POLICIES = "kv,round-robin,least-requests"
DEFAULT_UTILISATIONS = (0.6, 0.85, 1.15)
OWN_FLAGS = frozenset({"--policy", "--request-log", "--http-port", "--grpc-port", "--prefill", "--decode", "--seed"})
"""Flags of `serve` that every trial sets. A second value would silently win, and the table would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How clusters are started."""

    model: str
    prefill: int
    decode: int
    kv_cache_memory: str | None
    seed: int
    flags: tuple[str, ...]
    """Others of `twostroke serve`, as they are."""

    def __post_init__(self) -> None:
        positive("--prefill", self.prefill)
        positive("--decode", self.decode)
        for flag in self.flags:
            if flag.partition("=")[0] in OWN_FLAGS:
                raise ConfigError(
                    f"--serve-flags: {flag} is for `tests.trials.bench policies` to say", field="serve_flags"
                )

    def arguments(self, policy: str, log: Path) -> list[str]:
        memory = [] if self.kv_cache_memory is None else ["--kv-cache-memory", self.kv_cache_memory]
        counts = ["--prefill", str(self.prefill), "--decode", str(self.decode)]
        ports = ["--http-port", "0", "--grpc-port", "0"]
        own = ["--policy", policy, "--seed", str(self.seed), "--request-log", str(log)]
        return ["--model", self.model, *memory, *counts, *ports, *own, *self.flags]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesOptions:
    source: RequestSource
    served: Served
    policies: tuple[str, ...]
    """The baseline is one of them."""
    utilisations: tuple[float, ...]
    rounds: int
    warmup: int
    simulates: bool
    log_dir: Path | None
    """The folder in which request logs stay; None keeps none."""
    json_path: str | None

    def __post_init__(self) -> None:
        for value in self.utilisations:
            positive("--utilisations", value)
        positive("--rounds", self.rounds)
        positive("--warmup", self.warmup)
        file_can_be_made("--json", self.json_path)
        if self.log_dir is not None and not self.log_dir.is_dir():
            raise ConfigError(f"--log-dir {self.log_dir}: is not a directory", field="log_dir")
        unknown = [policy for policy in self.policies if policy not in POLICIES]
        if unknown:
            raise ConfigError(f"--policies: `twostroke serve` has no {', '.join(unknown)}", field="policies")


class _Flags(Settings):
    source: RequestSource = group(RequestSource, "requests", "which requests")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)
    titled = parser.add_argument_group("which clusters")
    titled.add_argument("--model", default="paced:", help="as `serve --model` (default: %(default)s)")
    titled.add_argument("--prefill", type=int, default=4, metavar="N", help="(default: %(default)s)")
    titled.add_argument("--decode", type=int, default=4, metavar="N", help="(default: %(default)s)")
    titled.add_argument("--kv-cache-memory", metavar="SIZE", help="as `serve --kv-cache-memory`")
    titled.add_argument(
        "--serve-flags",
        default="",
        metavar="FLAGS",
        help='others of `twostroke serve`: --serve-flags="--threads 2 --no-local-prefill"',
    )
    titled = parser.add_argument_group("what is compared")
    titled.add_argument(
        "--policies", default=DEFAULT_POLICIES, help=f"round-robin is always among them (default: {DEFAULT_POLICIES})"
    )
    titled.add_argument(
        "--utilisations",
        type=float,
        nargs="+",
        default=DEFAULT_UTILISATIONS,
        metavar="U",
        help="of prefill workers under round-robin (default: %(default)s)",
    )
    titled.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    titled.add_argument(
        "--warmup", type=int, default=32, metavar="N", help="short requests before each trial (default: %(default)s)"
    )
    titled = parser.add_argument_group("results")
    titled.add_argument(
        "--simulate",
        action="store_true",
        help="also play the same rows against a simulated fleet that is fitted to the request logs",
    )
    titled.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the request logs there")
    titled.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> PoliciesOptions:
    return PoliciesOptions(
        source=flags.read(_Flags, args).source,
        served=Served(
            model=args.model,
            prefill=args.prefill,
            decode=args.decode,
            kv_cache_memory=args.kv_cache_memory,
            seed=args.seed,
            flags=tuple(shlex.split(args.serve_flags)),
        ),
        policies=tuple(dict.fromkeys((*variants_from(args.policies), BASELINE))),
        utilisations=tuple(dict.fromkeys(args.utilisations)),
        rounds=args.rounds,
        warmup=args.warmup,
        simulates=args.simulate,
        log_dir=args.log_dir,
        json_path=args.json,
    )
