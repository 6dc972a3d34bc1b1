"""How late a router's event loop is while grammars compile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from router.metrics import RouterMetrics
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.preparer import ProcessPreparer
from router.requests.compiled_grammars import CompiledGrammars
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import load_text
from tests.trials.bench.extremes.outputs import extreme_outputs, output_of
from twostroke.base.errors import ServeError

TICK_S = 0.002
"""Streams of the router want the loop about as often."""
ORDINARY = output_of("json", {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})


@contextlib.asynccontextmanager
async def preparing(model_dir: Path) -> AsyncIterator[ProcessPreparer]:
    prepares = ProcessPreparer(load_text(str(model_dir)), str(model_dir), PreparedTexts(0, RouterMetrics()))
    running = asyncio.create_task(prepares.run())
    try:
        await prepares.compile(ORDINARY, "")  # its process starts
        yield prepares
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def lateness_s(prepares: ProcessPreparer, seconds: float, *, is_extreme: bool) -> list[float]:
    """Returns how much later than asked for the loop came back, each time within so many seconds."""
    outputs = extreme_outputs() if is_extreme else [ORDINARY]
    compiling = asyncio.create_task(_compile(prepares, outputs))
    until_s, late_s = time.perf_counter() + seconds, list[float]()
    try:
        while (before_s := time.perf_counter()) < until_s:
            await asyncio.sleep(TICK_S)
            late_s.append(time.perf_counter() - before_s - TICK_S)
    finally:
        compiling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await compiling
    return late_s


async def _compile(prepares: ProcessPreparer, outputs: list[StructuredOutput]) -> None:
    """Compiles all of them again and again; nothing is kept."""
    while True:
        grammars = CompiledGrammars(prepares, RouterMetrics())
        for output in outputs:
            with contextlib.suppress(ServeError):
                await grammars.compiled(output, "")
        await asyncio.sleep(TICK_S)
