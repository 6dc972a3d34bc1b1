"""`python -m tests.trials.bench conversion`: which end of a pull should convert its pages, and does the price choose
that one?

Two workers in this process, and their pages over tcp on loopback: a prompt's pages lie at the source in one form and
come to the puller in another. The source converts, the puller does, or whoever is cheaper by price, after a pull that
measured the link. For a slow link, limit loopback in a network namespace:

    unshare --net sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 160mbit burst 256kb latency 1s &&
        python -m tests.trials.bench conversion'
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from tools.output import write_json
from tools.tables import console_for, table_of, text_grid, text_row
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.cache import KV_FORMATS
from twostroke.config.settings import Settings, group, setting

BLOCK = 16
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
"""The pages of SmolLM2-135M."""
FORCED = {"source": (1e-9, 1e3), "puller": (1e3, 1e-9)}
"""Seconds per page of the source and the puller that leave no choice."""
BY_PRICE = "by price"
WARM = 16
"""Blocks of the pull before, which measures the link."""


class ConversionOptions(Settings):
    source: str = setting("int8", choices=KV_FORMATS, help="form of pages at the source")
    puller: str = setting("bfloat16", choices=KV_FORMATS, help="form of pages at the puller")
    tokens: int = setting(2000, least=BLOCK, help="length of the prompt")
    repeat: int = setting(3, least=1, help="pulls of each kind, of which the median counts")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        if self.source == self.puller:
            raise ConfigError("--source and --puller are the same form: nothing is converted", field="--puller")
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: ConversionOptions = group(ConversionOptions, "conversion")


@dataclass(frozen=True, slots=True)
class Pulled:
    converts: str
    """The end that converts, or that the price chooses."""
    moved_bytes: int
    by_puller: int
    """Pages that the puller converted."""
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags."""
    options = flags.read(_Flags, args).options
    found = [_median(converts, options) for converts in (*FORCED, BY_PRICE)]
    grid = text_grid(
        ("converts", "MB moved", "pages converted by the puller", "s"),
        [text_row(p.converts, f"{p.moved_bytes / 1e6:.1f}", str(p.by_puller), f"{p.seconds:.3f}") for p in found],
    )
    title = f"{options.tokens // BLOCK} pages, {options.source} -> {options.puller}"
    console_for(options.json_path).print(table_of(grid, title))
    write_json({"pulls": [dataclasses.asdict(pulled) for pulled in found]}, options.json_path)
    return 0


def _median(converts: str, options: ConversionOptions) -> Pulled:
    pulls = [asyncio.run(_pull(converts, options)) for _ in range(options.repeat)]
    middle = statistics.median_low(pull.seconds for pull in pulls)
    return next(pull for pull in pulls if pull.seconds == middle)


async def _pull(converts: str, options: ConversionOptions) -> Pulled:
    from tests.unit.worker.pulls.two_forms import content, two_forms
    from twostroke.page_forms.page_form import PageShape

    shape, blocks = PageShape(LAYERS, KV_HEADS, BLOCK, HEAD_DIM), options.tokens // BLOCK
    prompts = [list(range(WARM)), list(range(1000, 1000 + blocks))]
    async with two_forms(
        options.source, options.puller, transport="tcp", shape=shape, pages=2 * (blocks + WARM)
    ) as workers:
        for prompt in prompts:
            workers.compute(prompt, content(len(prompt), options.source, shape=shape))
        await workers.pull(prompts[0])[1]
        if converts in FORCED:
            source_s, puller_s = FORCED[converts]
            workers.prices(source_s=source_s, puller_s=puller_s)
        started_s = asyncio.get_running_loop().time()
        report = await workers.pull(prompts[1], 2)[1]
        seconds = asyncio.get_running_loop().time() - started_s
        if report.failure is not None:
            raise report.failure
        return Pulled(converts, report.copied_bytes, report.converted, seconds)
