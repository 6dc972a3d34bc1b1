"""Quantised safetensors are served as they are: the numbers that they stand for, near logits, and the file's size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from tests.unit.models.decoders.test_native_transformer import logits_of, native, plain, prompt
from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES
from tests.unit.models.weights.stored.packed_sizes import billed_bytes, packed_bytes
from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.products.stored import StoredMatrix
from twostroke.models.catalog.places import cache_dir
from twostroke.models.weights import packed_file
from twostroke.models.weights.stored.formats import open_weights


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_served_as_it_is(name: str, tmp_path: Path, kernels: Kernels) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    meaning = quantised(tmp_path, FORMATS[name])
    with open_weights(tmp_path, torch.float32) as files:
        for key, tensor in meaning.items():
            torch.testing.assert_close(files.take(key, *tensor.shape), tensor, rtol=2**-22, atol=1e-6)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    wide = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ours = logits_of(native(tmp_path, kernels), tokens)
    assert (ours - truth).abs().mean() < 4 * wide.mean(), "inputs rounded to int8 cost no more than that"
    assert torch.equal(logits_of(native(tmp_path, kernels), tokens), ours), "a mapped file has what was packed"
    assert billed_bytes(tmp_path) == packed_bytes(tmp_path)


@pytest.mark.parametrize("name", ["GPTQ, zeros", "compressed int8"])
def test_keys_with_biases_are_balanced_by_factors_of_rows(name: str, tmp_path: Path, kernels: Kernels) -> None:
    saved(Qwen2Config(**SIZES), tmp_path)
    quantised(tmp_path, FORMATS[name])
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    wide = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    assert (logits_of(native(tmp_path, kernels), tokens) - truth).abs().mean() < 4 * wide.mean()


def test_what_the_config_ignores_stays_exact(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    quantised(tmp_path, FORMATS["AWQ"])
    with open_weights(tmp_path, torch.bfloat16, keeps_codes=True) as files:
        assert isinstance(files.take_matrix("lm_head.weight", 131, 64), torch.Tensor)
        assert isinstance(files.take_matrix("model.layers.0.mlp.up_proj.weight", 96, 64), StoredMatrix)


def test_codes_without_a_config_that_says_so_are_refused(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    config = (tmp_path / "config.json").read_text(encoding="utf-8")
    quantised(tmp_path, FORMATS["FP8 per channel"])
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ConfigError, match="float8_e4m3fn, which is served only where quantization_config says"):
        plain(tmp_path, torch.float32)
