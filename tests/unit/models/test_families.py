"""Models of every family, with what published configs use: transformers' logits, and its tokens through pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2Model, PreTrainedConfig

from tests.unit.kernels.pools.whole_pool import pool_over
from tests.unit.models.decoders.test_native_transformer import logits_of, native, plain, prompt
from tests.unit.models.family_configs import CONFIGS, GEMMA, GPT, MIXED, SHORT_LONGROPE, WINDOW
from tests.unit.models.test_registry import our_logits, saved
from twostroke.base.errors import UnsupportedModel
from twostroke.config.model import AUTO
from twostroke.engine.branches import code_of
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kv_cache.form import page_form
from twostroke.models.decoders.choice import LoadOptions, load_model
from twostroke.models.decoders.transformer import Model
from twostroke.models.families.table import FAMILIES
from twostroke.models.registry import read_spec
from twostroke.models.rope import rope_tables

LONGEST, BLOCK, NEW_TOKENS = 160, 16, 10
ODD: Sequence[int] = (1, 7, 33, 2, 19, 16, 3)
"""Lengths of chunks, over and over."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are slower with more threads, which wait for each other where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(config: PreTrainedConfig, directory: Path) -> Any:
    """Returns the model of transformers, saved. Norms that multiply with 1 + w get weights around 0."""
    config._attn_implementation = "eager"
    model = saved(config, directory)
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for correction in corrections:  # which transformers starts at 0
        torch.nn.init.uniform_(correction, -0.3, 0.3)
    if corrections:
        model.save_pretrained(directory)
    if config.model_type.startswith("gemma"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.sub_(1)
        model.save_pretrained(directory)
    return model


class Pages:
    """A model in float32 over the pages of one sequence."""

    def __init__(
        self,
        directory: Path,
        kernels: Kernels | None,
        form: str,
        *,
        is_deterministic: bool = False,
        implementation: str = AUTO,
    ) -> None:
        spec = read_spec(directory, None, implementation)
        shape = spec.page_shape(BLOCK)
        self.data = torch.zeros(LONGEST // BLOCK, page_form(form).page_bytes(shape), dtype=torch.uint8)
        pool = pool_over(self.data, page_form(form), shape, torch.float32)
        backend = choose_attention(
            pool,
            heads=spec.heads,
            rules=spec.rules,
            kernels=kernels,
            dtype=torch.float32,
            is_deterministic=is_deterministic,
        )
        options, code = LoadOptions(dtype=torch.float32), code_of(spec)
        self.model: Model = (
            load_model(directory, spec, backend, kernels, options)
            if code is None
            else code.load(directory, spec, backend, options)
        )
        self.angles = rope_tables(spec.ropes, LONGEST)

    def step(self, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Returns the logits behind the last token."""
        at = torch.arange(start, len(tokens))
        batch = RaggedBatch(
            positions=at.int(),
            query_starts=(0, len(at)),
            context_lens=(len(tokens),),
            block_tables=torch.arange(len(self.data), dtype=torch.int32)[None],
            write_slots=at,
            cosines=self.angles[0][at],
            sines=self.angles[1][at],
        )
        logits = self.model.forward(torch.tensor(tokens[start:]).int(), batch, torch.tensor([len(at) - 1]))
        assert logits is not None
        return logits[0]

    def prefill(self, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Computes the tokens chunk by chunk; the logits behind the last."""
        end = 0
        for length in _forever(chunks):
            start, end = end, min(len(tokens), end + length)
            logits = self.step(tokens[:end], start)
            if end == len(tokens):
                return logits
        raise AssertionError

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns the likeliest continuation; pages of the first half are lost on the way, as by a preemption."""
        known, logits = list(tokens), self.prefill(tokens, ODD)
        for made in range(count):
            known.append(int(logits.argmax()))
            if made == count // 2:
                self.data.zero_()
                logits = self.prefill(known, (50,))
            else:
                logits = self.step(known, len(known) - 1)
        return known[len(tokens) :]


def _forever(lengths: Sequence[int]) -> Iterator[int]:
    while True:
        yield from lengths


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = reference(CONFIGS[name], tmp_path)
    tokens = prompt(150)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(our_logits(tmp_path, tokens), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "ways", [("native", "deterministic"), pytest.param(("torch",), marks=pytest.mark.slow)], ids=" ".join
)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_transformers_in_odd_chunks_and_after_a_preemption(
    name: str, ways: tuple[str, ...], tmp_path: Path, kernels: Kernels
) -> None:
    """In torch alone, the gate has the logits of whole prompts, and the same tokens where sums have a fixed order."""
    model = reference(CONFIGS[name], tmp_path)
    tokens = prompt(90)
    expected = greedy(model, tokens.tolist(), NEW_TOKENS)
    for way in ways:
        served = Pages(
            tmp_path, kernels if way == "native" else None, "float32", is_deterministic=way == "deterministic"
        )
        assert served.answer(tokens.tolist(), NEW_TOKENS) == expected


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Returns the likeliest continuation by whole forward passes, which no cache and no end of sequence changes."""
    known = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(tokens) :]


@pytest.mark.parametrize(
    "name", ["gemma2, tight caps", "gemma3", "mistral, window", "gpt2, scores by layer", "gpt_oss"]
)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_pages_of_small_numbers_obey_the_rules_natively_as_in_torch(
    name: str, form: str, tmp_path: Path, kernels: Kernels
) -> None:
    reference(CONFIGS[name], tmp_path)
    tokens = prompt(150).tolist()
    ours, theirs = (Pages(tmp_path, usable, form).prefill(tokens, ODD) for usable in (kernels, None))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", [name for name in CONFIGS if "deepseek" not in name or "whole dense" in name])
def test_one_native_call_is_nearer_to_the_truth_than_torch(name: str, tmp_path: Path, kernels: Kernels) -> None:
    """Rounding may choose other experts where some are nearly equal: DeepSeek's many small ones are tried elsewhere."""
    reference(CONFIGS[name], tmp_path)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    theirs = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ours = (logits_of(native(tmp_path, kernels), tokens) - truth).abs()
    assert ours.mean() < theirs.mean()


def test_what_lies_before_the_window_changes_nothing(tmp_path: Path, kernels: Kernels) -> None:
    """Two layers that see a window each reach back over twice its length, and no farther."""
    reference(CONFIGS["mistral, window"], tmp_path)
    tokens, reach = prompt(150).tolist(), 2 * (WINDOW - 1)
    other = [(token + 1) % 131 for token in tokens[: -reach - 1]] + tokens[-reach - 1 :]
    nearer = [(token + 1) % 131 for token in tokens[:-reach]] + tokens[-reach:]
    expected, same, different = (
        Pages(tmp_path, kernels, "float32").prefill(each, ODD) for each in (tokens, other, nearer)
    )
    assert torch.equal(same, expected)
    assert not torch.equal(different, expected)


def test_longrope_has_the_numbers_of_the_served_length(tmp_path: Path) -> None:
    model = reference(SHORT_LONGROPE, tmp_path)
    for max_model_len, count in ((64, 40), (None, 100)):
        spec = read_spec(tmp_path, max_model_len)
        tokens = prompt(count)
        with torch.inference_mode():
            expected = model(tokens[None]).logits[0]
        ours = our_logits(tmp_path, tokens, max_model_len=max_model_len)
        torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4)
        assert spec.max_position_embeddings == 256


def test_a_checkpoint_of_the_bare_model_is_read_too(tmp_path: Path) -> None:
    model = reference(GPT2Config(**GPT), tmp_path)
    tokens = prompt(50)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert set(bare) == set(GPT2Model(GPT2Config(**GPT)).state_dict())
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(our_logits(tmp_path, tokens), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bill_counts_every_weight(name: str, tmp_path: Path) -> None:
    model = reference(CONFIGS[name], tmp_path)
    counted = read_spec(tmp_path).weight_bytes("float32", with_head=True)
    corrections = (each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert counted == sum(tensor.nbytes for tensor in (*model.parameters(), *corrections))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gpt2", "add_cross_attention", True),
        ("gpt_oss", "hidden_act", "gelu"),
        ("gemma2", "hidden_activation", "relu2"),
    ],
)
def test_options_that_are_not_computed_are_refused_by_key(name: str, key: str, value: object, tmp_path: Path) -> None:
    config = CONFIGS[name].to_dict() | {key: value}
    type(CONFIGS[name])(**config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as refusal:
        read_spec(tmp_path)
    assert "activation" in refusal.value.message if key == "hidden_activation" else key in refusal.value.message
    assert "\n" not in refusal.value.message


def test_every_family_is_tried_here_or_beside() -> None:
    tried = {config.model_type for config in CONFIGS.values()} | {"llama"}
    assert {family.model_type for family in FAMILIES.values()} == tried
    assert MIXED.count("sliding_attention") == 1 < GEMMA["num_hidden_layers"]
