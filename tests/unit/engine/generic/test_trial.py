"""A generic model is tried over pages before it serves: distances, the mark of bits, and what is refused."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import Starcoder2Config

from tests.unit.engine.test_build import config
from tests.unit.engine.tiny import save_tiny
from tests.unit.models.generic_configs import GENERIC, SIZES
from tests.unit.models.test_registry import saved
from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.config import CacheConfig, WorkerConfig
from twostroke.config.model import AUTO, TRANSFORMERS
from twostroke.engine.adapters.slots import AdapterSlots
from twostroke.engine.backends.cpu.backend import CpuBackend, CpuPlan
from twostroke.engine.build import build_runner
from twostroke.kernels.cpu.variants import OVERRIDE, TORCH

MEMORY = 1 << 21


@pytest.fixture
def stablelm(tmp_path: Path) -> Path:
    saved(GENERIC["stablelm"], tmp_path)
    return tmp_path


def test_distances_are_logged_once_and_say_why_bits_may_differ(
    stablelm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        built = build_runner(config(str(stablelm), MEMORY), stablelm)
    built.close()
    lines = [record.getMessage() for record in caplog.records if "generic model tried" in record.getMessage()]
    assert len(lines) == 1
    assert "model=StableLmForCausalLM plain_distance=" in lines[0]
    assert "from plain attention" in built.determinism.why


def test_a_model_of_our_families_takes_no_adapters_where_it_runs_in_transformers_code(tmp_path: Path) -> None:
    """Its answers would be those of the model alone, under the adapter's name."""
    save_tiny(tmp_path)
    takers = {}
    for implementation in (AUTO, TRANSFORMERS):
        with contextlib.closing(
            build_runner(config(str(tmp_path), MEMORY, model_impl=implementation), tmp_path)
        ) as built:
            takers[implementation] = AdapterSlots in built.offers
    assert takers == {AUTO: True, TRANSFORMERS: False}


@pytest.mark.parametrize("heads", [1, 4])
def test_a_model_with_one_head_of_keys_has_the_outputs_of_plain_attention(heads: int, tmp_path: Path) -> None:
    sizes = SIZES | {"num_attention_heads": heads, "num_key_value_heads": 1}
    saved(Starcoder2Config(**sizes), tmp_path)
    with contextlib.closing(build_runner(config(str(tmp_path), MEMORY), tmp_path)) as built:
        assert "from plain attention" in built.determinism.why


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_is_kept_where_the_trial_found_the_same_bits_and_refused_elsewhere(
    dtype: str, stablelm: Path
) -> None:
    built = build_runner(config(str(stablelm), MEMORY, dtype=dtype), stablelm)
    built.close()
    asked = config(str(stablelm), MEMORY, dtype=dtype, deterministic=True)
    if built.determinism.holds:
        build_runner(asked, stablelm).close()
    else:
        with pytest.raises(ConfigError, match=r"--deterministic cannot be kept: StableLmForCausalLM"):
            build_runner(asked, stablelm)


@pytest.mark.parametrize("variant", ["", TORCH])
@pytest.mark.parametrize("form", ["float32", "int8", "fp8_e4m3", "int4"])
def test_every_form_of_pages_stays_within_its_bound(
    form: str, variant: str, stablelm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variant:
        monkeypatch.setenv(OVERRIDE, variant)
    asked = config(str(stablelm), MEMORY).replace(cache=CacheConfig(kv_cache_memory_bytes=MEMORY, kv_format=form))
    build_runner(asked, stablelm).close()


def test_a_model_whose_attention_is_not_what_we_compute_is_refused_with_the_distance(
    stablelm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModel, match=r"StableLmForCausalLM is not served: .* are \d\.\de[+-]\d\d from those"):
        _built_with(stablelm, monkeypatch, scale=0.5)


def test_a_window_that_the_model_does_not_have_is_noticed(stablelm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match=r"1\.0e-03 would be rounding"):
        _built_with(stablelm, monkeypatch, window=20)


def _built_with(directory: Path, monkeypatch: pytest.MonkeyPatch, **rule: Any) -> None:
    """Builds an engine whose attention has other rules than the model asks for."""
    plan = CpuBackend.plan

    def changed(backend: CpuBackend, asked: WorkerConfig) -> CpuPlan:
        rules = tuple(replace(each, **rule) for each in backend.spec.layer_rules)
        object.__setattr__(backend.spec, "layer_rules", rules)
        return plan(backend, asked)

    monkeypatch.setattr(CpuBackend, "plan", changed)
    build_runner(config(str(directory), MEMORY), directory).close()


def test_weights_that_are_no_numbers_are_refused(stablelm: Path) -> None:
    tensors = load_file(stablelm / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, stablelm / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"outputs are nan from those"):
        build_runner(config(str(stablelm), MEMORY), stablelm)
