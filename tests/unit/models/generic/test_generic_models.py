"""Models that transformers' code computes over our pages: its own tokens, and a spec that says what it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch

from tests.unit.models.decoders.test_native_transformer import prompt
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.generic_configs import GENERIC, WINDOW
from tests.unit.models.test_families import NEW_TOKENS, ODD, Pages, greedy, one_thread, reference
from twostroke.base.errors import ConfigError
from twostroke.config.model import TRANSFORMERS
from twostroke.engine.generic.code import GenericCode
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.models.decoders.choice import LoadOptions
from twostroke.models.families.table import FAMILIES
from twostroke.models.known_specs import known_spec
from twostroke.models.registry import read_spec

__all__ = ["one_thread"]

IN_GATE: Final = ("gemma2, tight caps", "gemma3", "gpt_oss", "gpt2, scores by layer")
"""Families whose attention has between them all options: caps, windows, sinks, scales by layer."""


def is_alike(name: str) -> bool:
    """Whether the code of transformers has such pages as ours has, and serves all lengths."""
    return "deepseek" not in name and "longrope" not in str(CONFIGS[name].to_dict())


@pytest.mark.parametrize("name", GENERIC)
def test_tokens_equal_transformers_in_odd_chunks_and_after_a_preemption(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    model = reference(GENERIC[name], tmp_path)
    tokens = prompt(90).tolist()
    expected = greedy(model, tokens, NEW_TOKENS)
    for usable in (kernels, None):
        assert Pages(tmp_path, usable, "float32").answer(tokens, NEW_TOKENS) == expected


@pytest.mark.parametrize("name", GENERIC)
def test_the_bill_counts_every_weight_and_a_prefill_worker_has_no_head(name: str, tmp_path: Path) -> None:
    model = reference(GENERIC[name], tmp_path)
    spec = read_spec(tmp_path)
    assert spec.weight_bytes("float32", with_head=True) == sum(each.nbytes for each in model.parameters())
    headless = sum(each.nbytes for each in model.base_model.parameters())
    assert spec.weight_bytes("float32", with_head=False) == headless


def test_none_of_them_has_a_family() -> None:
    kinds = {config.model_type for config in GENERIC.values()}
    assert not kinds & {family.model_type for family in FAMILIES.values()}


def test_a_spec_says_what_each_layer_asks_for(tmp_path: Path) -> None:
    reference(GENERIC["cohere2"], tmp_path)
    spec = read_spec(tmp_path)
    assert [rule.window for rule in spec.rules] == [WINDOW, WINDOW, WINDOW, None]
    assert spec.architecture == "Cohere2ForCausalLM"
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (4, 4, 2, 16)
    assert (spec.vocab_size, spec.max_position_embeddings, spec.eos_token_ids) == (131, 256, (2,))


def test_scores_have_the_scale_that_the_model_asks_for(tmp_path: Path) -> None:
    for name, scale in (("granite", 0.2), ("opt", 1.0)):
        reference(GENERIC[name], tmp_path / name)
        assert {rule.scale for rule in read_spec(tmp_path / name).rules} == {scale}


def test_a_spec_that_was_probed_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    GENERIC["exaone4"].save_pretrained(tmp_path / "model")
    first = known_spec(tmp_path / "model")
    assert first == known_spec(tmp_path / "model") == read_spec(tmp_path / "model")
    assert len(list((tmp_path / "cache" / "models" / "specs").iterdir())) == 1


@pytest.mark.parametrize(
    "name",
    [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if is_alike(name)],
)
def test_a_family_of_ours_runs_in_the_code_of_transformers_where_that_is_asked_for(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    model = reference(CONFIGS[name], tmp_path)
    ours, theirs = read_spec(tmp_path), read_spec(tmp_path, None, TRANSFORMERS)
    assert (ours.generic is None, theirs.generic is None) == (True, False)
    assert ours.page_shape(16) == theirs.page_shape(16)
    assert [(each.window, each.softcap) for each in ours.rules] == [
        (each.window, each.softcap) for each in theirs.rules
    ]
    assert ours.weight_bytes("float32", with_head=True) == theirs.weight_bytes("float32", with_head=True)
    tokens = prompt(60).tolist()
    expected = greedy(model, tokens, NEW_TOKENS)
    assert Pages(tmp_path, kernels, "float32", implementation=TRANSFORMERS).answer(tokens, NEW_TOKENS) == expected


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_pages_of_small_numbers_are_read_natively_as_in_torch(form: str, tmp_path: Path, kernels: Kernels) -> None:
    reference(GENERIC["cohere2"], tmp_path)
    tokens = prompt(150).tolist()
    ours, theirs = (Pages(tmp_path, usable, form).prefill(tokens, ODD) for usable in (kernels, None))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_int8_weights_are_refused_by_name(tmp_path: Path) -> None:
    reference(GENERIC["opt"], tmp_path)
    spec = read_spec(tmp_path)
    pool = PagePool.empty(2, "float32", spec.page_shape(16))
    backend = choose_attention(pool, heads=spec.heads, rules=spec.rules, kernels=None, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"--weights int8 is not computed for OPTForCausalLM"):
        GenericCode().load(tmp_path, spec, backend, LoadOptions(dtype=torch.float32, is_int8=True))
