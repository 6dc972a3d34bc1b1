"""A model's weights rounded into a format, as the files that such a model is published in.

The sources of GPTQ: Frantar et al., arxiv.org/abs/2210.17323, with inputs in the order of their size.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from tests.unit.models.weights.stored.coded_models import FORMATS, Format, Tensors, packed, requantised

FILES: Final = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
CALIBRATED: Final = "GPTQ of 4 bits, act-order"
BLOCK: Final = 128
GROUP: Final = 32
DAMPING: Final = 0.01
"""Share of the mean of a Hessian's diagonal that is added to it, as GPTQ does."""
Hessians = Mapping[str, torch.Tensor]


def copied(source: Path, target: Path, name: str, calibration: torch.Tensor) -> Path:
    """Writes the model in `source`, rounded into a format, into `target`. `calibration`: int64 [tokens]."""
    target.mkdir()
    for file in FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, target / file)
    if name == CALIBRATED:
        hessians = hessians_of(source, calibration)
        options = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}
        requantised(target, options, lambda module, weight: gptq(weight, hessians[module]))
        return target
    form = Format(FP8_OPTIONS, fp8_in_blocks) if name == "FP8 in blocks of 128" else FORMATS[name]
    requantised(target, form.options, lambda _, weight: form.quantise(weight))
    return target


FP8_OPTIONS: Final[dict[str, Any]] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def fp8_in_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Returns a matrix [rows, inputs] with a scale for each block of 128 x 128, and what it stands for."""
    rows, inputs = weight.shape
    wide = torch.nn.functional.pad(weight, (0, -inputs % BLOCK, 0, -rows % BLOCK))
    blocks = wide.view(wide.shape[0] // BLOCK, BLOCK, wide.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    by = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :inputs]
    codes = (weight / by).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * by


@torch.inference_mode()
def hessians_of(directory: Path, calibration: torch.Tensor) -> Hessians:
    """Returns X^T X of the inputs of each linear module, float32 [inputs, inputs], over some text."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found: dict[str, torch.Tensor] = {}
    shared: dict[str, torch.Tensor] = {}
    """Sums by the first module of those that have one input."""
    alias = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}

    def watch(name: str, module: torch.nn.Linear) -> None:
        first = next((name.replace(own, of) for own, of in alias.items() if name.endswith(own)), name)
        if first not in shared:
            shared[first] = torch.zeros(module.in_features, module.in_features)
        found[name] = shared[first]
        if first != name:
            return

        def add(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            x = arguments[0].flatten(0, -2)
            found[name].addmm_(x.T, x)

        module.register_forward_pre_hook(add)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            watch(name, module)
    for window in torch.split(calibration, 512):
        model.model(window[None])
    return found


def gptq(weight: torch.Tensor, hessian: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Returns the tensors of a matrix [rows, inputs] in 4 bits with zeros, largest inputs first, and what they mean."""
    inputs, top = weight.shape[1], 15
    diagonal = hessian.diagonal().clone()
    order = diagonal.argsort(descending=True)
    damped = hessian + torch.eye(inputs) * (DAMPING * diagonal.mean() + (diagonal == 0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    left = weight.float()[:, order].contiguous()
    codes, scales, zeros = torch.empty_like(left), [], []
    meaning = torch.empty_like(left)
    for at in range(inputs):
        if at % GROUP == 0:
            some = left[:, at : at + GROUP]
            low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
            scales.append(((high - low) / top).clamp(min=1e-6).half())
            zeros.append((-low / scales[-1].float()).round().clamp(1, top))
        scale, zero = scales[-1].float(), zeros[-1]
        codes[:, at] = ((left[:, at] / scale).round() + zero).clamp(0, top)
        meaning[:, at] = (codes[:, at] - zero) * scale
        error = (left[:, at] - meaning[:, at]) / upper[at, at]
        left[:, at + 1 :].addr_(error, upper[at, at + 1 :], alpha=-1)
    place = order.argsort()
    return {
        "qweight": packed(codes[:, place], 4).t(),
        "qzeros": packed(torch.stack(zeros) - 1, 4),
        "scales": torch.stack(scales),
        "g_idx": (place // GROUP).int(),
    }, meaning[:, place]
