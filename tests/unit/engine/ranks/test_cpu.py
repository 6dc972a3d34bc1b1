"""A runner of two ranks: what fails outside of what the ranks compute together ends nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.unit.engine.tiny import TINY, save_tiny
from twostroke.base.errors import RankLost
from twostroke.config import CacheConfig, ModelConfig, Role, WorkerConfig
from twostroke.engine.build import build_runner
from twostroke.kernels.cpu.build import Kernels
from twostroke.worker.steps.engine_check import probe_batch


def test_a_step_that_fails_before_or_after_the_ranks_compute_it_loses_none_of_them(
    tmp_path: Path, kernels: Kernels
) -> None:
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d",
        model=ModelConfig(model=str(save_tiny(tmp_path)), dtype="float32", device="cpu", decode_tp=2),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 20),
    )
    built = build_runner(config, tmp_path)
    step = probe_batch(built.model.block_size, built.model.pages, built.model.max_model_len, samples=True)
    (sample,) = step.samples
    tokens = built.runner.run(step).tokens
    far = np.full_like(step.positions, TINY.max_position_embeddings)
    params = dataclasses.replace(sample.params, logit_bias=((TINY.vocab_size, 1.0),))
    for failing in (
        dataclasses.replace(step, positions=far),
        dataclasses.replace(step, samples=(sample._replace(params=params),)),
    ):
        with pytest.raises(IndexError):
            built.runner.run(failing)
        assert built.runner.run(step).tokens == tokens
    assert built.lost is not None
    assert not built.lost.done()
    with pytest.raises(RankLost, match=r"failed(:| with) IndexError"):  # all ranks do: which one is blamed is a race
        built.runner.run(dataclasses.replace(step, tokens=np.full_like(step.tokens, TINY.vocab_size)))
    assert isinstance(built.lost.result(5), RankLost)
    built.close()
