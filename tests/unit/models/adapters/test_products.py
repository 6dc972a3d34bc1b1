"""An adapter beside its model gives what the model with merged weights gives, and nobody else's rows change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.lora import random_tensors, write_adapter
from tests.merged import merged_model
from tests.unit.models.decoders.test_native_transformer import BLOCK, PAGES, Served, logits_of, native, plain, prompt
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_registry import SIZES, saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised
from tests.unit.models.weights.stored.gguf_models import written
from twostroke.base.errors import ConfigError, UnsupportedFeature
from twostroke.engine.adapters.model_adapters import ModelAdapters
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.products.linear import TorchLinears
from twostroke.kernels.products.steady import SteadyLinears
from twostroke.models.adapters.peft import Adapter, read_adapter
from twostroke.models.adapters.shapes import ProjectionShapes
from twostroke.models.decoders.choice import LoadOptions, load_model
from twostroke.models.registry import read_spec
from twostroke.observability.profiler import KERNELS, KernelRecord, KernelRecords

MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    **{name: CONFIGS[name] for name in ("gemma2", "gemma3", "phi3")},
}
"""The keys of Qwen2 have a bias: rows of its projections are balanced, and so must be those of its adapters."""
SOME = ["q_proj", "v_proj"]


def an_adapter(directory: Path, seed: int = 0, **options: Any) -> Adapter:
    shapes = ProjectionShapes.of(read_spec(directory))
    folder = directory / f"adapter{seed}"
    return read_adapter(write_adapter(folder, random_tensors(shapes, seed=seed, **options), lora_alpha=8))


def merged(directory: Path, adapter: Adapter, to: Path) -> Path:
    """The directory of the model with the adapter worked into its weights."""
    merged_model(directory, adapter).save_pretrained(to)
    return to


def logits_with(served: Served, tokens: torch.Tensor, adapter: Any) -> torch.Tensor:
    logits = served.logits([tokens], [0], list(range(len(tokens))), adapters=(adapter,))
    assert logits is not None
    return logits.float()


def slots(directory: Path, dtype: torch.dtype, linears: Any) -> ModelAdapters:
    return ModelAdapters(directory, read_spec(directory), dtype, linears=linears)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("projections", [None, SOME], ids=["all", "some"])
def test_in_float32_the_logits_are_those_of_merged_weights(
    name: str, projections: list[str] | None, tmp_path: Path
) -> None:
    saved(MODELS[name], tmp_path / "base")
    adapter = an_adapter(tmp_path / "base", **({} if projections is None else {"projections": projections}))
    expected = logits_of(plain(merged(tmp_path / "base", adapter, tmp_path / "merged"), torch.float32), prompt(37))
    served = plain(tmp_path / "base", torch.float32)
    prepared = slots(tmp_path / "base", torch.float32, TorchLinears()).prepare(adapter)
    got = logits_with(served, prompt(37), prepared)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(got, logits_of(served, prompt(37)), atol=1e-2), "the adapter changes something"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
def test_natively_the_logits_are_near_those_of_merged_weights(
    name: str, is_int8: bool, tmp_path: Path, kernels: Kernels
) -> None:
    saved(MODELS[name], tmp_path / "base")
    adapter = an_adapter(tmp_path / "base")
    folder = merged(tmp_path / "base", adapter, tmp_path / "merged")
    exact, rounded = plain(folder, torch.float32), native(folder, kernels, is_int8=is_int8)
    prepared = slots(tmp_path / "base", torch.bfloat16, None).prepare(adapter)
    served = native(tmp_path / "base", kernels, is_int8=is_int8)
    usual, ours = 0.0, 0.0
    for seed in range(4):
        tokens = prompt(37, seed=seed)
        truth = logits_of(exact, tokens)
        usual += float((logits_of(rounded, tokens) - truth).abs().mean())
        ours += float((logits_with(served, tokens, prepared) - truth).abs().mean())
    assert ours < 1.3 * usual, "as near as the merged model in the same number format"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ["native", "steady"])
def test_rows_depend_on_their_own_adapter_alone(name: str, engine: str, tmp_path: Path, kernels: Kernels) -> None:
    saved(MODELS[name], tmp_path)
    served, prepared = _engine(engine, tmp_path, kernels)
    check_rows(served, prepared)


def check_rows(served: Served, prepared: list[Any]) -> None:
    """Rows with either adapter or none have the same bits alone and together, in other chunks."""
    sequences = [prompt(length, seed=length) for length in (30, 3, 17, 9)]
    adapters = (prepared[0], None, prepared[1], prepared[0])
    alone = [
        (logits_of(served, tokens) if adapter is None else logits_with(served, tokens, adapter))[-1]
        for tokens, adapter in zip(sequences, adapters, strict=True)
    ]
    done = [29, 1, 16, 4]
    begun = [tokens[:count] for tokens, count in zip(sequences, done, strict=True)]
    assert served.logits(begun, [0] * 4, None, adapters=adapters) is None
    ends = torch.tensor([len(tokens) - count for tokens, count in zip(sequences, done, strict=True)]).cumsum(0) - 1
    order = [2, 0, 3, 1]
    together = served.logits(sequences, done, ends[order].tolist(), adapters=adapters)
    assert together is not None
    for row, sequence in enumerate(order):
        assert torch.equal(together[row].float(), alone[sequence]), sequence


def test_a_profile_names_what_adapters_add_with_its_work(tmp_path: Path, kernels: Kernels) -> None:
    saved(MODELS["llama"], tmp_path)
    served, prepared = _engine("native", tmp_path, kernels)
    records, adapters = KernelRecords(), (prepared[0], None, prepared[1], prepared[0])
    sequences, done = [prompt(length, seed=length) for length in (3, 3, 3, 3)], [2, 2, 2, 2]
    with_records = served.logits(sequences, done, [0, 1, 2, 3], records, adapters=adapters)
    plain = served.logits(sequences, done, [0, 1, 2, 3], adapters=adapters)
    assert with_records is not None
    assert plain is not None
    assert torch.equal(with_records, plain)
    found = [(KERNELS[row[4]], row[2:4]) for row in KernelRecord.iter_unpack(records.packed())]
    names = [name for name, _ in found]
    layer = ["adapters", "rope and store", "attention", "output", "adapters"]
    layer += ["norm", "gate and up", "adapters", "activation after adapters", "down", "adapters"]
    assert names[: 3 + len(layer)] == ["embedding", "norm", "qkv", *layer]
    sizes = ProjectionShapes.of(served.spec).sizes
    weights = {name: 4 * sum(sizes[name]) for name in sizes}  # of one adapter of rank 4
    q, k, v = (weights[name] for name in ("q_proj", "k_proj", "v_proj"))
    all_of_one, some = q + k + v, q + v
    assert found[3][1] == (2.0 * (all_of_one + some), 2.0 * (2 * all_of_one + some))
    output = weights["o_proj"]
    assert found[7][1] == (2.0 * output, 2.0 * 2 * output), "one adapter changes it, in two rows"


def _engine(engine: str, directory: Path, kernels: Kernels) -> tuple[Served, list[Any]]:
    if engine == "native":
        served, own = native(directory, kernels), slots(directory, torch.bfloat16, None)
    else:
        served, own = _steady(directory), slots(directory, torch.float32, SteadyLinears())
    return served, [own.prepare(an_adapter(directory, seed, projections=kept)) for seed, kept in enumerate(KEPT)]


KEPT = (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], SOME)


def _steady(directory: Path) -> Served:
    spec = read_spec(directory)
    pool = PagePool.empty(PAGES, "float32", spec.page_shape(BLOCK))
    backend = choose_attention(
        pool, heads=spec.heads, rules=spec.rules, kernels=None, dtype=torch.float32, is_deterministic=True
    )
    model = load_model(directory, spec, backend, None, LoadOptions(dtype=torch.float32, is_deterministic=True))
    return Served(spec, model)


def test_an_adapter_of_other_shapes_is_refused(tmp_path: Path) -> None:
    saved(MODELS["llama"], tmp_path / "base")
    folder = write_adapter(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"layers\.0\.down_proj is adapted from 12 to 8"):
        slots(tmp_path / "base", torch.float32, TorchLinears()).prepare(read_adapter(folder))


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_neox", "gpt2"])
def test_families_whose_adapters_are_not_computed_are_refused_by_name(name: str, tmp_path: Path) -> None:
    saved(CONFIGS[name], tmp_path / "base")
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    with pytest.raises(UnsupportedFeature, match=f"adapters of {read_spec(tmp_path / 'base').architecture}"):
        slots(tmp_path / "base", torch.float32, TorchLinears()).prepare(adapter)


WIDER = SIZES | {"hidden_size": 64, "intermediate_size": 128}
QUANTISED = ("GPTQ with act-order", "AWQ", "FP8 in blocks", "compressed int4, zeros", "GGUF")


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("config", [LlamaConfig(**WIDER), Qwen2Config(**WIDER)], ids=["llama", "qwen2"])
def test_beside_quantised_weights_it_adds_what_it_adds_to_the_numbers_that_they_stand_for(
    config: PreTrainedConfig, form: str, tmp_path: Path, kernels: Kernels
) -> None:
    base, dense = tmp_path / "base", tmp_path / "dense"
    if form == "GGUF":
        written(config, config.model_type, base, ("Q4_0", "Q8_0", "Q5_0"), meaning=dense)
    else:
        saved(config, base)
        shutil.copytree(base, dense)
        save_file(quantised(base, FORMATS[form]), dense / "model.safetensors")
    adapter = an_adapter(base)
    folder = merged(dense, adapter, tmp_path / "merged")
    served, prepared = native(base, kernels), slots(base, torch.bfloat16, None).prepare(adapter)
    alone, truth = (logits_of(plain(each, torch.float32), prompt(37)) for each in (dense, folder))
    usual = (logits_of(served, prompt(37)) - alone).abs().mean() / alone.std()
    error = (logits_with(served, prompt(37), prepared) - truth).abs().mean()
    assert error / truth.std() < 1.5 * usual, "as near as the quantised model alone"
    assert error < 0.2 * (truth - alone).abs().mean()


def test_rows_beside_quantised_weights_depend_on_their_own_adapter_alone(tmp_path: Path, kernels: Kernels) -> None:
    saved(LlamaConfig(**WIDER), tmp_path)
    quantised(tmp_path, FORMATS["AWQ"])
    served, prepared = _engine("native", tmp_path, kernels)
    check_rows(served, prepared)
