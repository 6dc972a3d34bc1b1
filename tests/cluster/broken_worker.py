"""`python -m tests.cluster.broken_worker`: a decode worker whose engine fails for good after some steps.

Its id says how: "decode-raises" raises in every step, "decode-device" as the device's driver does.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from decode_worker.worker import DecodeWorker
from twostroke.base.errors import EngineLost
from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.build import build_runner
from twostroke.scheduler.batch import Batch, Runner, StepResult
from twostroke.worker import engine_state
from twostroke.worker.process import main

HEALTHY_STEPS = 60
"""Enough to start, and to begin with some answers."""


class BrokenRunner:
    def __init__(self, runner: Runner, worker_id: str) -> None:
        self._runner = runner
        self._worker_id = worker_id
        self._steps = 0

    def run(self, batch: Batch) -> StepResult:
        self._steps += 1
        if self._steps <= HEALTHY_STEPS:
            return self._runner.run(batch)
        if self._worker_id == "decode-raises":
            raise RuntimeError("no step succeeds any more")
        error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        raise EngineLost(f"the device failed: {error}") from error

    def close(self) -> None:
        self._runner.close()


def build_broken(config: WorkerConfig, model_dir: Path | None) -> BuiltEngine:
    built = build_runner(config, model_dir)
    return replace(built, runner=BrokenRunner(built.runner, config.worker_id))


if __name__ == "__main__":
    engine_state.build_runner = build_broken  # type: ignore[attr-defined]  # imported there
    sys.exit(main(DecodeWorker))
