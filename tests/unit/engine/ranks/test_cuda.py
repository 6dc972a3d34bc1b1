"""A worker of several ranks on devices, in processes of their own; the CPU takes the devices' place, gloo NCCL's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.engine.backends.cuda.test_fit import fake_cuda
from tests.unit.engine.backends.cuda.test_plan import config
from tests.unit.engine.batches import Stream, generate, step
from tests.unit.engine.host_devices import CannotRecord, take_the_devices_place
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_registry import saved
from tests.unit.ranks.test_processes import pids_of_children
from twostroke.base.errors import ConfigError, RankLost
from twostroke.config import CacheConfig, WorkerConfig
from twostroke.config.adapters import AdapterConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.backends.cuda.fit import devices_from
from twostroke.engine.build import build_runner
from twostroke.engine.ranks.cuda import RankedDeviceMemory
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kv_cache.form import Conversion, KvForm
from twostroke.kv_cache.memory import Pages
from twostroke.models.registry import read_spec
from twostroke.scheduler.batch import Batch

ROOM = CacheConfig(kv_cache_memory_bytes=1 << 20)
PROMPT = [7919 * index % 130 for index in range(1, 42)]
BLOCKS = [7, 2, 9, 4]
FULL_BLOCKS = 2
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    take_the_devices_place(monkeypatch.setattr)


def config_for(directory: Path, ranks: int) -> WorkerConfig:
    return config(directory, max_model_len=96, tp=ranks).model_copy(update={"cache": ROOM})


def saved_model(name: str, directory: Path) -> Path:
    saved(CONFIGS[name], directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def children() -> set[int]:
    """The processes that this one has started before."""
    return pids_of_children()


@pytest.fixture
def phi3(tmp_path: Path, children: set[int]) -> Iterator[BuiltEngine]:
    """A worker of two ranks."""
    built = build_runner(config_for(saved_model("phi3", tmp_path), 2), tmp_path)
    yield built
    built.close()


def read(memory: Pages, page: int) -> np.ndarray:
    access = memory.access(1)
    [[view]] = access.read([[page]])
    found = np.frombuffer(bytes(view), np.uint8).copy()
    access.close()
    return found


def write(memory: Pages, page: int, content: np.ndarray) -> None:
    access = memory.access(1)
    access.landing([page])[0][:] = content.data
    access.landed()
    access.synchronize()
    access.close()


def fail(batch: Batch) -> None:
    raise torch.OutOfMemoryError("too many rows")


@pytest.mark.parametrize("name", ["phi3", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_ranks_in_processes_answer_as_one_and_take_and_give_its_pages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step fails on the first rank alone, and all are lost."""
    ranks = 2
    directory = saved_model(name, tmp_path)
    shape = read_spec(directory).page_shape(16)
    alone = build_runner(config_for(directory, 1), directory)
    answer = generate(alone.runner, Stream(PROMPT.copy(), BLOCKS), 8, chunk=9)
    before = pids_of_children()
    ranked = build_runner(config_for(directory, ranks), directory)
    assert isinstance(ranked.memory, RankedDeviceMemory)
    assert (ranked.model.pages, ranked.model.page_bytes) == (alone.model.pages, alone.model.page_bytes)
    assert generate(ranked.runner, Stream(PROMPT.copy(), BLOCKS), 8, chunk=9) == answer
    forms = KvForm(f"float32/{ranks}"), KvForm("float32")
    to_whole, to_parts = Conversion(*forms, shape, has_pieces=False), Conversion(*forms[::-1], shape, has_pieces=False)
    for page in BLOCKS[:FULL_BLOCKS]:
        expected, found = read(alone.memory, page), np.zeros(alone.model.page_bytes, np.uint8)
        convert_page(to_whole, torch.from_numpy(read(ranked.memory, page)), torch.from_numpy(found))
        np.testing.assert_allclose(found.view(np.float32), expected.view(np.float32), rtol=1e-4, atol=1e-4)
        parts = np.zeros_like(expected)
        convert_page(to_parts, torch.from_numpy(expected), torch.from_numpy(parts))
        write(ranked.memory, page + 10, parts)
        assert np.array_equal(read(ranked.memory, page + 10), parts)
    pulled = Stream(PROMPT.copy(), [17, 12, 13, 14], computed=16 * FULL_BLOCKS)
    assert generate(ranked.runner, pulled, 8, chunk=9) == answer, "each rank has its range of pages that were pulled"
    monkeypatch.setattr(ranked.runner, "launch", fail)
    with pytest.raises(RankLost, match="the first rank failed with OutOfMemoryError: too many rows"):
        ranked.runner.run(step([(Stream(PROMPT.copy(), BLOCKS), 20)]))
    ranked.close()
    assert pids_of_children() == before
    alone.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_freezes_is_the_loss_of_all_also_within_a_step(
    phi3: BuiltEngine, children: set[int], number: int
) -> None:
    stream = Stream(PROMPT.copy(), BLOCKS)
    phi3.runner.run(step([(stream, 20)]))
    [pid] = pids_of_children() - children
    os.kill(pid, number)
    why = rf"rank 1 of 2 \(pid {pid}\) " + (
        "died: signal 9" if number == signal.SIGKILL else "is frozen: no sign of life"
    )
    with pytest.raises(RankLost, match=why):
        phi3.runner.run(step([(stream, 20)]))
    assert phi3.lost is not None
    assert phi3.lost.result(WAIT_S).message.startswith(f"rank 1 of 2 (pid {pid})")


def test_what_another_rank_cannot_load_is_one_line_also_when_all_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_the_devices_place(monkeypatch.setattr, CannotRecord)
    before = pids_of_children()
    why = "OutOfMemoryError: no room for recordings"
    with pytest.raises(ConfigError, match=rf"^rank 1 of 2 \(pid \d+\) cannot load: {why}$"):
        build_runner(config_for(saved_model("phi3", tmp_path), 2), tmp_path)
    assert pids_of_children() == before


def test_adapters_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    adapters = AdapterConfig(allow_runtime_lora_updating=True)
    wanted = config_for(saved_model("phi3", tmp_path), 2).model_copy(update={"adapters": adapters})
    with pytest.raises(
        ConfigError, match=r"^--tp 2: adapters are shared out over ranks on CPUs only: give --device cpu$"
    ):
        build_runner(wanted, tmp_path)


def test_each_rank_has_the_next_device_and_too_few_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 4)
    assert [device.index for device in devices_from(torch.device("cuda:1"), 3)] == [1, 2, 3]
    with pytest.raises(
        ConfigError, match=r"^--tp 4 takes as many CUDA devices, and from cuda:1 on this worker sees 3;"
    ):
        devices_from(torch.device("cuda:1"), 4)
