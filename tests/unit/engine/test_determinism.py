"""What --deterministic asks of an engine before it serves, and what refuses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.engine.test_build import config
from tests.unit.engine.tiny import save_tiny
from twostroke.base.errors import ConfigError
from twostroke.engine.backends.cuda import fit as device_fit
from twostroke.engine.build import build_runner
from twostroke.engine.determinism import NATIVE, PACED, STEADY, TORCH, check_deterministic
from twostroke.kv_cache.memory import PageMemory
from twostroke.scheduler.batch import Batch

BLOCK = 16


@pytest.fixture
def memory() -> Iterator[PageMemory]:
    memory = PageMemory(4, BLOCK)
    yield memory
    memory.close()


class Engine:
    """Pages hold tokens, logits their sum; either may depend on how many sequences are in the step."""

    def __init__(self, memory: PageMemory, *, pages_lapse: bool = False, logits_lapse: bool = False) -> None:
        self._memory = memory
        self._pages_lapse, self._logits_lapse = pages_lapse, logits_lapse

    def logits(self, batch: Batch) -> torch.Tensor:
        company = batch.sequences - 1
        for token, slot in zip(batch.tokens.tolist(), batch.write_slots.tolist(), strict=True):
            self._memory.data[slot // BLOCK, slot % BLOCK] = token + self._pages_lapse * company
        return torch.full((len(batch.samples), 3), 7.0 + self._logits_lapse * company * 1e-6)


def check(engine: Engine, memory: PageMemory) -> None:
    check_deterministic(engine, memory, block_size=BLOCK, vocab=100, longest=1000, with_head=True)


def test_an_engine_that_looks_at_nobody_else_is_taken(memory: PageMemory) -> None:
    check(Engine(memory), memory)


@pytest.mark.parametrize("lapse", ["pages_lapse", "logits_lapse"])
def test_an_engine_whose_pages_or_logits_depend_on_company_is_refused(memory: PageMemory, lapse: str) -> None:
    with pytest.raises(ConfigError, match="--deterministic cannot be kept on this machine") as error:
        check(Engine(memory, **{lapse: True}), memory)
    assert error.value.field == "deterministic"


def test_engines_say_whether_they_are_deterministic_and_only_equal_ones_exchange_pages(tmp_path: Path) -> None:
    tiny = save_tiny(tmp_path / "tiny")
    plain, steady = (build_runner(config(str(tiny), deterministic=flag), tiny) for flag in (False, True))
    paced = build_runner(config("paced:", 1 << 20), None)
    assert [each.determinism for each in (plain, steady, paced)] == [TORCH, STEADY, PACED]
    assert not TORCH.holds
    assert NATIVE.holds
    before, tensors = plain.model.fingerprint.rsplit(";", 1)
    assert steady.model.fingerprint.startswith(f"{before};arithmetic=")
    assert steady.model.fingerprint.endswith(f";{tensors}")
    for each in (plain, steady, paced):
        each.close()


def test_cuda_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = save_tiny(tmp_path / "tiny")
    monkeypatch.setattr(device_fit, "resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(ConfigError, match="--deterministic cannot be kept on CUDA"):
        build_runner(config(str(tiny), deterministic=True), tiny)
