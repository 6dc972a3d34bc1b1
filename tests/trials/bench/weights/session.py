"""All formats beside bfloat16: predictions over the same text, and times of steps in turns; a table, JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from tests.trials.bench.forms.form_model import BLOCK, FormModel, Span, local_model
from tests.trials.bench.forms.quality import compare
from tests.trials.bench.weights.copies import copied
from tests.trials.bench.weights.options import WeightOptions
from tools.output import write_json
from twostroke.base.errors import ConfigError
from twostroke.models.catalog.places import cache_dir

DECODED_AT: Final = 128
"""Tokens before the one of a timed decode step."""
PREFILLED: Final = 1024
CALIBRATION_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatResult:
    name: str
    perplexity: float
    mean_kl: float
    same: float
    decode_ms: float | None
    prefill_s: float | None


def run_session(options: WeightOptions) -> int:
    with local_model(options.model, options.threads) as model, own_cache() as folder:
        tokens = model.encode(options.text.read_text(encoding="utf-8"))
        windows, rest = split_text(tokens, options)
        served = {"": FormModel(model, "bfloat16", capacity(options))}
        for name in options.formats:
            local = replace(model, directory=copied(model.directory, folder / name, name, rest))
            served[name] = FormModel(local, "bfloat16", capacity(options))
        found = results(served, windows, options)
    Console().print(table_of(found), highlight=False)
    write_json({"schema_version": 1, "formats": [dataclasses.asdict(each) for each in found]}, options.json_path)
    return 0


def capacity(options: WeightOptions) -> int:
    return max(options.window_tokens, PREFILLED) + BLOCK


def split_text(tokens: torch.Tensor, options: WeightOptions) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the windows, from the beginning on, and what follows them, for calibration."""
    needed = options.windows * options.window_tokens
    if len(tokens) < needed + options.window_tokens:
        raise ConfigError(f"--text has {len(tokens)} tokens, {needed + options.window_tokens} are needed", field="text")
    return list(torch.split(tokens[:needed], options.window_tokens)), tokens[needed : needed + CALIBRATION_TOKENS]


@contextmanager
def own_cache() -> Iterator[Path]:
    """Packed weights of copies go where they are removed with them."""
    kernels, before = cache_dir() / "kernels", os.environ.get("TWOSTROKE_CACHE")
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        (Path(folder) / "kernels").symlink_to(kernels)
        os.environ["TWOSTROKE_CACHE"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["TWOSTROKE_CACHE"]
            if before is not None:
                os.environ["TWOSTROKE_CACHE"] = before


def results(served: dict[str, FormModel], windows: list[torch.Tensor], options: WeightOptions) -> list[FormatResult]:
    others = {name: model for name, model in served.items() if name}
    predicted = compare(served[""], others, windows)
    times = timed(served, windows[0], options.rounds)
    return [
        FormatResult(
            name=name or "bfloat16",
            perplexity=math.exp(loss),
            mean_kl=kl,
            same=same,
            decode_ms=times[name][0],
            prefill_s=times[name][1],
        )
        for name, (loss, kl, same) in predicted.items()
    ]


def timed(
    served: dict[str, FormModel], tokens: torch.Tensor, rounds: int
) -> dict[str, tuple[float | None, float | None]]:
    """Returns the least milliseconds of a decode step and seconds of a prefill, models in turns."""
    if not rounds:
        return dict.fromkeys(served, (None, None))
    decodes, prefills = dict.fromkeys(served, math.inf), dict.fromkeys(served, math.inf)
    prompt = tokens.repeat(-(-PREFILLED // len(tokens)))[:PREFILLED]
    table = torch.arange(PREFILLED // BLOCK + 1)
    for number in range(rounds):
        for name, model in served.items():
            if number % 4 == 0:
                prefills[name] = min(prefills[name], seconds(partial(model.store, prompt)))
            for _ in range(4):
                span = Span(prompt[DECODED_AT : DECODED_AT + 1], DECODED_AT, table)
                step = seconds(partial(model.step, [span], torch.zeros(1, dtype=torch.int64)))
                decodes[name] = min(decodes[name], step * 1e3)
    return {name: (decodes[name], prefills[name]) for name in served}


def seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def table_of(found: list[FormatResult]) -> Table:
    table = Table()
    for column in ("weights", "perplexity", "KL", "same", "decode ms", "prefill s"):
        table.add_column(column)
    for each in found:
        times = ["-" if value is None else f"{value:.2f}" for value in (each.decode_ms, each.prefill_s)]
        table.add_row(each.name, f"{each.perplexity:.3f}", f"{each.mean_kl:.4f}", f"{each.same:.3f}", *times)
    return table
