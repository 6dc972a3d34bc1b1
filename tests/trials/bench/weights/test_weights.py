"""`tests.trials.bench weights`: copies in each format, a whole run over a tiny model, and what is refused."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.trials.bench.weights import run
from tests.trials.bench.weights.copies import fp8_in_blocks, gptq, hessians_of
from tests.trials.bench.weights.options import FORMATS, options_from
from tests.unit.models.weights.stored.coded_models import rounded
from twostroke.base.errors import ConfigError

WORDS = 64
TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=WORDS,
    max_position_embeddings=2048,
    initializer_range=0.3,
    eos_token_id=2,
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY, dtype=torch.bfloat16).save_pretrained(tmp_path / "tiny")
    tokenizer = Tokenizer(models.WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    words = torch.randint(WORDS, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    (tmp_path / "text").write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return tmp_path


def test_every_format_has_a_row_beside_bfloat16(tiny: Path, arguments: Callable[..., argparse.Namespace]) -> None:
    flags = ("--windows", "2", "--window-tokens", "100", "--rounds", "1", "--json", str(tiny / "found.json"))
    assert run(arguments("weights", "--model", str(tiny / "tiny"), "--text", str(tiny / "text"), *flags)) == 0
    found = json.loads((tiny / "found.json").read_text(encoding="utf-8"))["formats"]
    assert [each["name"] for each in found] == ["bfloat16", *FORMATS]
    assert found[0]["mean_kl"] == 0 < min(each["mean_kl"] for each in found[1:])
    assert all(each["decode_ms"] > 0 < each["prefill_s"] for each in found)


def test_gptq_changes_outputs_less_than_rounding_to_the_nearest() -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(600, 12, generator=draw) @ torch.randn(12, 96, generator=draw)
    x += 0.3 * torch.randn(600, 96, generator=draw)  # inputs that have much in common, as those of models have
    weight = torch.randn(64, 96, generator=draw)
    nearest = rounded(weight, 4, 32, is_symmetric=False, dtype=torch.float16)[3]
    parts, ours = gptq(weight, x.T @ x)
    lost, lost_nearest = (float((x @ (weight - each).T).square().mean()) for each in (ours, nearest))
    assert 0 < lost < 0.5 * lost_nearest
    assert sorted(parts["g_idx"].tolist()) == sorted(index // 32 for index in range(96))


def test_modules_with_one_input_share_its_hessian(tiny: Path) -> None:
    hessians = hessians_of(tiny / "tiny", torch.arange(WORDS))
    attention, mlp = "model.layers.0.self_attn", "model.layers.1.mlp"
    assert hessians[f"{attention}.q_proj"] is hessians[f"{attention}.v_proj"]
    assert hessians[f"{mlp}.up_proj"] is hessians[f"{mlp}.gate_proj"]
    assert hessians[f"{mlp}.down_proj"].shape == (96, 96)
    assert all(float(each.diagonal().min()) > 0 for each in hessians.values())


def test_blocks_of_fp8_have_a_scale_each() -> None:
    weight = torch.randn(200, 160, generator=torch.Generator().manual_seed(3))
    weight[130:, 140:] *= 100
    parts, meaning = fp8_in_blocks(weight)
    assert parts["weight_scale_inv"].shape == (2, 2)
    torch.testing.assert_close(meaning, weight, rtol=2**-4, atol=1e-2)


def test_formats_that_are_not_there_and_texts_that_are_too_short_are_refused(
    tiny: Path, arguments: Callable[..., argparse.Namespace]
) -> None:
    with pytest.raises(ConfigError, match="--formats NF4: the formats are"):
        options_from(arguments("weights", "--formats", "NF4"))
    with pytest.raises(ConfigError, match="--text has 400 tokens, 3072 are needed"):
        run(arguments("weights", "--model", str(tiny / "tiny"), "--text", str(tiny / "text")))
