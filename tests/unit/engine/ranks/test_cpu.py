"""A runner of two ranks: what it is given reaches both, and what fails outside of what they compute ends nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.engine.tiny import TINY, save_tiny
from tests.unit.models.adapters.test_products import an_adapter
from twostroke.base.errors import RankLost
from twostroke.config import CacheConfig, ModelConfig, Role, WorkerConfig
from twostroke.engine.adapters.slots import AdapterSlots
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.build import build_runner
from twostroke.kernels.cpu.build import Kernels
from twostroke.scheduler.batch import Batch
from twostroke.worker.steps.engine_check import probe_batch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def built(tiny: Path, kernels: Kernels) -> Iterator[BuiltEngine]:
    with contextlib.closing(engine_of(tiny, 2)) as ranked:
        yield ranked


def engine_of(directory: Path, ranks: int) -> BuiltEngine:
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d",
        model=ModelConfig(model=str(directory), dtype="float32", device="cpu", decode_tp=ranks),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 20),
    )
    return build_runner(config, directory)


def probe_of(built: BuiltEngine) -> Batch:
    return probe_batch(built.model.block_size, built.model.pages, built.model.max_model_len, samples=True)


def test_an_adapter_that_the_engine_takes_is_computed_by_all_ranks(built: BuiltEngine, tiny: Path) -> None:
    adapter = an_adapter(tiny, size=30.0)

    def logprobs_of(engine: BuiltEngine) -> list[float]:
        """Without the adapter, and with it."""
        step, slots = probe_of(engine), engine.offers[AdapterSlots]
        (sample,) = step.samples
        row = sample._replace(params=dataclasses.replace(sample.params, logprobs=1))
        slots.put(adapter.digest, slots.prepare(adapter))
        each = [dataclasses.replace(step, samples=(row,), weights=weights) for weights in ((), (adapter.digest,))]
        found = [engine.runner.run(asked).tokens[0].top[0][1] for asked in each]
        slots.drop(adapter.digest)
        return found

    with contextlib.closing(engine_of(tiny, 1)) as alone:
        plain, adapted = logprobs_of(alone)
    assert abs(plain - adapted) > 0.01
    assert logprobs_of(built) == pytest.approx([plain, adapted], abs=1e-4)


def test_a_step_that_fails_before_or_after_the_ranks_compute_it_loses_none_of_them(built: BuiltEngine) -> None:
    step = probe_of(built)
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
