"""Quantised models on a device: steps over codes answer as over expanded weights, and the bill knows their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen2MoeConfig

from tests.unit.engine.batches import Stream, step
from tests.unit.engine.reference_attention import reference_kernels
from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES
from twostroke.engine.backends.cuda.accelerator import CpuAccelerator
from twostroke.engine.backends.cuda.plan import DeviceKernels, DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kernels.products.device_codes import DeviceMatrix
from twostroke.kernels.products.stored import StoredMatrix, Weight
from twostroke.kv_cache.form import page_form
from twostroke.models.families.table import layouts_named, named
from twostroke.models.registry import read_spec
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.formats import open_weights
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.models.weights.tensors import DeviceWeights, take_weights

CPU: Final = torch.device("cpu")
PAGES: Final = 4
EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: Final[dict[str, PreTrainedConfig]] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2, whose keys are balanced": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "experts, and a shared one": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=96),
}


def plan_for(directory: Path) -> DevicePlan:
    spec, layouts = read_spec(directory), layouts_in(directory)
    assert layouts is not None
    return DevicePlan(
        spec=spec,
        device=CPU,
        dtype="float32",
        form=page_form("float32"),
        block_size=16,
        max_model_len=64,
        max_tokens=32,
        max_sequences=1,
        with_head=True,
        layout_of=layouts_named(layouts, spec),
    )


def runner_of(
    directory: Path,
    *,
    keeps_codes: bool,
    kernels_over: Callable[[AnyPool, ModelSpec, torch.dtype], DeviceKernels] = reference_kernels,
) -> DeviceRunner:
    plan = plan_for(directory)
    pages = torch.zeros((PAGES + 1, plan.needs().page_bytes), dtype=torch.uint8)
    with open_weights(directory, torch.float32, CPU, keeps_codes=keeps_codes) as files:
        return make_device_runner(plan, files, [pages], CpuAccelerator(), kernels_over)


@pytest.mark.parametrize(
    ("model", "form"),
    [("llama", form) for form in ("AWQ", "FP8 in blocks", "compressed MXFP4")]
    + [(model, "GPTQ of 8 bits, zeros, act-order") for model in list(MODELS)[1:]],
)
def test_a_step_over_codes_has_the_logits_of_one_over_expanded_weights(model: str, form: str, tmp_path: Path) -> None:
    saved(MODELS[model], tmp_path)
    quantised(tmp_path, FORMATS[form])
    logits = []
    for keeps_codes in (True, False):
        runner = runner_of(tmp_path, keeps_codes=keeps_codes)
        logits.append(runner.logits(step([(Stream(list(range(3, 30)), [2, 1]), 27)])))
        runner.close()
    assert logits[0] is not None
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["GPTQ, zeros", "FP8 in blocks"])
@pytest.mark.parametrize("model", MODELS)
def test_the_bill_counts_codes_where_codes_are_kept(model: str, form: str, tmp_path: Path) -> None:
    saved(MODELS[model], tmp_path)
    quantised(tmp_path, FORMATS[form])
    plan = plan_for(tmp_path)
    saved_bytes = 0
    with open_weights(tmp_path, torch.float32, CPU, keeps_codes=True) as files:
        weights = take_weights(named(files, plan.spec), plan.spec, with_head=True)
        for matrix in (part for weight in products(weights) for part in weight if isinstance(part, StoredMatrix)):
            kept = DeviceMatrix.of(matrix, CPU)
            of_codes = sum(each.nbytes for each in (kept.codes, kept.scales, kept.mins) if each is not None)
            saved_bytes += matrix.rows * matrix.inputs * 4 - of_codes
    expanded = plan.spec.weight_bytes("float32", with_head=True)
    assert saved_bytes > 0
    assert plan.needs().weight_bytes == expanded - saved_bytes


def products(weights: DeviceWeights) -> Iterator[Weight]:
    for layer in weights.layers:
        yield layer.qkv.weight
        yield layer.attention_output.weight
        if layer.mlp is not None:
            yield from (layer.mlp.inner.weight, layer.mlp.down.weight)
