"""Experts of gpt-oss in MXFP4, all of a layer in one tensor, are served as published: none of them is expanded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from tests.unit.models.decoders.test_native_transformer import Served, logits_of, native, plain, prompt
from tests.unit.models.family_configs import OSS
from tests.unit.models.test_families import Pages, greedy
from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import Tensors, with_expert_blocks
from tests.unit.models.weights.stored.packed_sizes import billed_bytes, packed_bytes
from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.products.stored import StoredMatrix
from twostroke.models.catalog.places import cache_dir
from twostroke.models.weights import packed_file
from twostroke.models.weights.stored.check import check_weights
from twostroke.models.weights.stored.formats import open_weights

CONFIG = GptOssConfig(**OSS | {"hidden_size": 64, "intermediate_size": 96}, attn_implementation="eager")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)


def written(directory: Path) -> Tensors:
    saved(CONFIG, directory)
    return with_expert_blocks(directory)


def test_tokens_are_those_of_transformers_with_the_same_numbers(tmp_path: Path, kernels: Kernels) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in written(tmp_path).items()}, strict=True)
    tokens = prompt(70).tolist()
    expected = greedy(model, tokens, 12)
    for usable in (kernels, None):
        assert Pages(tmp_path, usable, "float32").answer(tokens, 12) == expected


def test_codes_are_multiplied_as_they_are_and_the_bill_knows_their_size(tmp_path: Path, kernels: Kernels) -> None:
    written(tmp_path)
    with open_weights(tmp_path, torch.bfloat16, keeps_codes=True) as files:
        for part, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
            matrix = files.take_matrix(f"model.layers.1.mlp.experts.3.{part}.weight", *shape)
            assert isinstance(matrix, StoredMatrix)
            assert matrix.layout.is_fp4
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    wide = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ours = logits_of(native(tmp_path, kernels), tokens)
    assert (ours - truth).abs().mean() < 4 * wide.mean(), "inputs rounded to int8 cost no more than that"
    assert torch.equal(logits_of(native(tmp_path, kernels), tokens), ours), "a mapped file has what was packed"
    assert billed_bytes(tmp_path) == packed_bytes(tmp_path)


def test_a_row_of_grouped_codes_is_the_same_bits_in_chunks_and_beside_others(tmp_path: Path, kernels: Kernels) -> None:
    written(tmp_path)
    served: Served = native(tmp_path, kernels)
    sequences = [prompt(length, seed=length) for length in (30, 3, 17)]
    alone = [logits_of(served, tokens)[-1] for tokens in sequences]
    together = served.logits(sequences, [0, 0, 0], [29, 32, 49])
    assert together is not None
    for row in range(3):
        assert torch.equal(together[row].float(), alone[row])


def _without(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(part)]:
            del tensors[name]

    return change


def _cut(part: str, *shape: slice) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        name = f"model.layers.0.mlp.experts.{part}"
        tensors[name] = tensors[name][shape].contiguous()

    return change


def _endless(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255


EVERY = slice(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("_scales"), "has no scales"),
        (_cut("down_proj_blocks", slice(5)), "has scales of shape"),
        (_cut("gate_up_proj_blocks", EVERY, EVERY, EVERY, slice(8)), "has blocks of shape"),
        (_endless, "down_proj.scales has a scale that is not a number"),
    ],
)
def test_damaged_blocks_are_refused_before_a_worker_starts(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        check_weights(tmp_path)


def test_an_expert_that_the_blocks_lack_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 7}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"router|no expert 6"):
        plain(tmp_path, torch.float32)
