"""The flags of `tests.trials.bench cores`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made, positive
from tests.trials.bench.options import json_file
from tools.simulate.options import numbers
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting


class CoresOptions(Settings):
    """What is asked of the cluster, and what the simulator has to be near to."""

    rates: str = setting("0.8,1.4,2", unit="R,R,...", help="arrivals per second, one load after the other")
    requests: int = setting(40, least=2, most=1000, help="requests of each load")
    prompt_tokens: int = setting(1024, least=1, help="length of prompts, which are random")
    output_tokens: int = setting(128, least=2, help="length of answers")
    fit_rate: float = setting(1.8, above=0, unit="PER_SECOND", help="arrivals per second while steps are profiled")
    fit_s: float = setting(10.0, above=0, help="time for which steps are profiled")
    seed: int = setting(0, least=0, help="seed of prompts, arrivals and the simulator's noise")
    within: float = setting(0.1, above=0, unit="FRACTION", help="the simulated p50 and p90 have to be so near")
    fleet: str | None = setting(None, unit="FILE", help="write the fitted fleet there, for simulate --profile")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)
        file_can_be_made("--fleet", self.fleet)
        for rate in self.all_rates:
            positive("--rates", rate)

    @property
    def all_rates(self) -> tuple[float, ...]:
        return numbers("--rates", self.rates)


class _Flags(Settings):
    cores: CoresOptions = group(CoresOptions, "cores")


class Checked(Settings):
    said: CoresOptions
    serve_flags: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)
    parser.add_argument("serve_flags", nargs="*", metavar="-- SERVE_FLAGS", help="flags of `serve`")


def options_from(args: argparse.Namespace) -> Checked:
    return Checked(said=flags.read(_Flags, args).cores, serve_flags=tuple(args.serve_flags))
