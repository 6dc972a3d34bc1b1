"""Which device is taken, and a GPU that is too small: refused before anything is loaded, by the byte."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, Role, WorkerConfig
from twostroke.engine.backends.cuda.decode_graphs import graph_sizes
from twostroke.engine.backends.cuda.fit import resolve_device
from twostroke.engine.backends.cuda.plan import DevicePlan
from twostroke.kernels.layout import EXPANDED_BYTES
from twostroke.models.memory_needs import DRAW_BYTES, KEPT_BYTES, DeviceNeeds, MemoryReading, device_pages
from twostroke.models.spec import ModelSpec, RopeSpec

GIB = 1 << 30
NEEDS = DeviceNeeds(weight_bytes=16 * GIB, working_bytes=2 * GIB, page_bytes=GIB)

LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
    eos_token_ids=(),
    ropes=(RopeSpec(kind="default", inverse_frequencies=(1.0,) * 64),),
    norm_epsilon=1e-5,
)


def reading(free: int, total: int = 80 * GIB) -> MemoryReading:
    return MemoryReading("cuda:0", free, total)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA", "cuda:-1", "", "cuda:0,1"])
def test_an_unknown_device_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match="--device must be auto, cpu, cuda or cuda:N, got") as error:
        ModelConfig(device=name)
    assert repr(name) in error.value.message
    assert error.value.field == "--device"


def fake_cuda(monkeypatch: pytest.MonkeyPatch, count: int, version: str | None = "13.0") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", version)


def test_auto_is_the_first_cuda_device_and_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")
    fake_cuda(monkeypatch, 0)
    assert resolve_device("auto") == torch.device("cpu")


def test_a_device_that_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match="--device cuda:2: this machine's last CUDA device is cuda:1"):
        resolve_device("cuda:2")
    fake_cuda(monkeypatch, 0)
    with pytest.raises(ConfigError, match="--device cuda: torch finds no CUDA device"):
        resolve_device("cuda")
    fake_cuda(monkeypatch, 0, version=None)
    with pytest.raises(ConfigError, match="a build for CPUs alone; use --device cpu"):
        resolve_device("cuda:0")


def test_pages_take_what_the_share_leaves_beside_weights() -> None:
    cache = CacheConfig(device_share=0.5)
    assert device_pages(reading(80 * GIB), NEEDS, cache) == 40 - 16 - 2 - 1
    assert device_pages(reading(30 * GIB), NEEDS, cache) == 30 - 16 - 2 - 1, "others have taken part of the share"
    assert device_pages(reading(80 * GIB), NEEDS, CacheConfig(kv_cache_memory_bytes=7 * GIB)) == 7


def test_a_device_too_small_for_the_weights_says_by_how_many_bytes() -> None:
    with pytest.raises(
        ConfigError, match=rf"cuda:0 is {5 * GIB + 1} bytes too small: weights take {16 * GIB}"
    ) as error:
        device_pages(reading(16 * GIB - 1, total=16 * GIB), NEEDS, CacheConfig())
    assert error.value.field == "device"
    assert device_pages(reading(21 * GIB), NEEDS, CacheConfig(device_share=1)) == 2


def test_more_pages_than_fit_are_refused_by_how_many_bytes() -> None:
    with pytest.raises(ConfigError, match=rf"{3 * GIB} bytes too small: .* pages {11 * GIB}, but only") as error:
        device_pages(reading(26 * GIB), NEEDS, CacheConfig(kv_cache_memory_bytes=10 * GIB))
    assert error.value.field == "kv_cache_memory"


def test_less_memory_than_two_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"--kv-cache-memory {GIB} holds 1 pages of {GIB} bytes"):
        device_pages(reading(80 * GIB), NEEDS, CacheConfig(kv_cache_memory_bytes=GIB))


def test_a_share_too_small_for_the_weights_says_so() -> None:
    with pytest.raises(ConfigError, match=rf"share of its memory is {16 * GIB} bytes, {5 * GIB} too few"):
        device_pages(reading(80 * GIB), NEEDS, CacheConfig(device_share=0.2))


def plan(role: Role, **model: Any) -> DevicePlan:
    config = WorkerConfig(role=role, worker_id="worker", model=ModelConfig(max_model_len=8192, **model))
    return DevicePlan.of(config, LLAMA_8B, torch.device("cuda:0"))


def test_the_needs_of_a_model_are_counted_from_its_shape_alone() -> None:
    decode, prefill = plan(Role.DECODE).needs(), plan(Role.PREFILL).needs()
    assert decode.weight_bytes == 2 * 8_030_261_248, "the published number of parameters of such a model"
    assert decode.weight_bytes - prefill.weight_bytes == 2 * 128256 * 4096, "prefill workers have no head"
    assert plan(Role.DECODE, dtype="float32").needs().weight_bytes == 2 * decode.weight_bytes
    tied = dataclasses.replace(plan(Role.DECODE), spec=dataclasses.replace(LLAMA_8B, tie_word_embeddings=True))
    assert tied.needs().weight_bytes == prefill.weight_bytes
    assert decode.page_bytes == 2 << 20


def test_every_recorded_row_keeps_its_logits_which_is_counted() -> None:
    few, many = (
        dataclasses.replace(plan(Role.DECODE), max_sequences=rows, max_tokens=4096).needs().working_bytes
        for rows in (64, 512)
    )
    recorded = sum(graph_sizes(512)) - sum(graph_sizes(64))
    assert recorded > 5000
    assert many - few == 128256 * (448 * DRAW_BYTES + recorded * KEPT_BYTES)


def test_weights_that_are_codes_are_expanded_for_long_chunks_which_is_counted() -> None:
    plain, coded = (
        dataclasses.replace(plan(Role.DECODE), layout_of=layout_of).needs().working_bytes
        for layout_of in (None, lambda _name: None)
    )
    assert coded - plain == EXPANDED_BYTES


def test_an_8b_model_leaves_an_80_gib_device_most_of_itself_for_pages() -> None:
    pages = device_pages(reading(79 * GIB), plan(Role.DECODE).needs(), CacheConfig())
    assert 48 * GIB < pages * plan(Role.DECODE).needs().page_bytes < 57 * GIB


def test_device_and_share_travel_with_the_config() -> None:
    config = WorkerConfig(
        role=Role.DECODE, worker_id="d", model=ModelConfig(device="cuda:3"), cache=CacheConfig(device_share=0.25)
    )
    assert WorkerConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["cache"]["kv_cache_memory_bytes"] is None
