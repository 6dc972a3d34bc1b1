"""Model directories with quantised weights in each format of safetensors, made of small models with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
EXACT: Final = ("embed_tokens", "lm_head", ".mlp.gate.", "block_sparse_moe.gate.", "shared_expert_gate")
"""Parts of names of matrices that stay as they are: tables and routers."""


@dataclass(frozen=True)
class Format:
    """One way to quantise a matrix [rows, inputs]: the tensors of a file, and the float32 that they stand for."""

    options: dict[str, Any]
    quantise: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def quantised(directory: Path, form: Format) -> Tensors:
    """Quantise all projections of the saved model in place; return what all of its tensors stand for."""
    return requantised(directory, form.options, lambda _, weight: form.quantise(weight))


def requantised(
    directory: Path, options: dict[str, Any], quantise: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
) -> Tensors:
    """The same by the name of the module and its float32 matrix."""
    path = directory / "model.safetensors"
    written, meaning = {}, {}
    for name, tensor in load_file(path).items():
        meaning[name] = tensor
        if tensor.ndim != 2 or any(part in name for part in EXACT):
            written[name] = tensor.bfloat16()
            meaning[name] = written[name].float()
            continue
        parts, meaning[name] = quantise(name.removesuffix(".weight"), tensor.float())
        written |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    save_file(written, path)
    describe(directory, options)
    return meaning


def with_expert_blocks(directory: Path) -> Tensors:
    """Turns the experts of a saved gpt-oss into blocks of MXFP4 in place; returns what all of its tensors stand for."""
    path = directory / "model.safetensors"
    written, meaning = {}, {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            written[name] = meaning[name] = tensor.bfloat16()
            continue
        outputs = tensor.transpose(1, 2)
        parts, dense = _mxfp4(outputs.flatten(0, 1))
        written[f"{name}_blocks"] = parts["weight_packed"].view(*outputs.shape[:2], -1, 16).contiguous()
        written[f"{name}_scales"] = parts["weight_scale"].view(*outputs.shape[:2], -1).contiguous()
        meaning[name] = dense.view(outputs.shape).transpose(1, 2).contiguous()
    save_file(written, path)
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    describe(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ignored})
    return meaning


def describe(directory: Path, options: Any) -> None:
    """Sets the `quantization_config` of the directory."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"quantization_config": options}), encoding="utf-8")


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words of codes along the last dimension, the lowest bits first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    words = torch.unflatten(padded, -1, (-1, per_word)) << torch.arange(0, 32, bits)
    total = words.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def rounded(
    weight: torch.Tensor, bits: int, group: int, *, is_symmetric: bool, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Unsigned codes [rows, inputs], scales and zeros [rows, groups], and the float32 that they stand for."""
    groups = torch.unflatten(weight, 1, (-1, group))
    top = (1 << bits) - 1
    if is_symmetric:
        scales = (groups.abs().amax(-1) / (top / 2 - 0.5)).to(dtype)
        zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.float32)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, top)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top)
    meaning = (codes - zeros[..., None]) * scales.float()[..., None]
    return [codes.flatten(1), scales, zeros, meaning.flatten(1)]


def _gptq(bits: int, group: int, *, is_symmetric: bool, is_ordered: bool = False, v2: bool = False) -> Format:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        order = torch.arange(inputs)
        if is_ordered:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        codes, scales, zeros, meaning = rounded(
            weight[:, order], bits, size, is_symmetric=is_symmetric, dtype=torch.float16
        )
        place = order.argsort()
        stored_zeros = zeros - (0 if v2 else 1)
        return {
            "qweight": packed(codes[:, place], bits).t(),
            "qzeros": packed(stored_zeros.t(), bits),
            "scales": scales.t(),
            "g_idx": (place // size).int(),
        }, meaning[:, place]

    options = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": is_symmetric, "desc_act": is_ordered}
    return Format(options | ({"checkpoint_format": "gptq_v2"} if v2 else {}), quantise)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, meaning = rounded(weight, 4, 32, is_symmetric=False, dtype=torch.float16)

    def words(outputs: torch.Tensor) -> torch.Tensor:
        return packed(torch.unflatten(outputs.t(), 1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.t()}, meaning


def _fp8(name: str, block: int | None) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if block is None:
            scales = weight.abs().amax(1, keepdim=True) / 448
            wide = scales.expand_as(weight)
        else:
            rows, inputs = weight.shape
            shape = (-(-rows // block), -(-inputs // block))
            scales = torch.rand(shape, generator=torch.Generator().manual_seed(rows)) * 1e-3 + 2e-3
            wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :inputs]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, name: scales}, codes.float() * wide

    return quantise


def _fp8_per_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": scale.clone()}, codes.float() * scale


def _packed_int(bits: int, *, is_symmetric: bool) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, meaning = rounded(weight, bits, 32, is_symmetric=is_symmetric, dtype=torch.bfloat16)
        parts = {"weight_packed": packed(codes, bits), "weight_scale": scales}
        if not is_symmetric:
            parts["weight_zero_point"] = packed(zeros.t(), bits).t()
        return parts | {"weight_shape": torch.tensor(weight.shape)}, meaning

    return quantise


def _int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, meaning = rounded(weight, 8, weight.shape[1], is_symmetric=False, dtype=torch.float32)
    return {
        "weight": (codes - 128).to(torch.int8),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 128).to(torch.int8),
    }, meaning


def _mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = torch.unflatten(weight, 1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=1e-6) / 6).log2().ceil()
    halves = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) / 2
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - halves).abs().argmin(-1)
    low, high = codes.flatten(1)[:, 0::2], codes.flatten(1)[:, 1::2]
    meaning = halves[codes] * torch.exp2(exponents)[..., None]
    return {
        "weight_packed": (low | high << 4).to(torch.uint8),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }, meaning.flatten(1)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The options of compressed-tensors with one group of modules."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def fp8_in_blocks(size: int) -> Format:
    """FP8 with a scale for each square block of so many rows and inputs."""
    options = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [size, size]}
    return Format(options, _fp8("weight_scale_inv", size))


FORMATS: Final = {
    "GPTQ": _gptq(4, 32, is_symmetric=True),
    "GPTQ, zeros": _gptq(4, 32, is_symmetric=False),
    "GPTQ, zeros, v2": _gptq(4, 32, is_symmetric=False, v2=True),
    "GPTQ with act-order": _gptq(4, 32, is_symmetric=True, is_ordered=True),
    "GPTQ of 8 bits": _gptq(8, 32, is_symmetric=True),
    "GPTQ of 8 bits, zeros, act-order": _gptq(8, 32, is_symmetric=False, is_ordered=True),
    "GPTQ, a scale per row": _gptq(4, -1, is_symmetric=True),
    "AWQ": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, _awq),
    "FP8 per tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_per_tensor),
    "FP8 per channel": Format({"quant_method": "fp8"}, _fp8("weight_scale", None)),
    "FP8 in blocks": fp8_in_blocks(64),
    "compressed int4": Format(
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
        _packed_int(4, is_symmetric=True),
    ),
    "compressed int4, zeros": Format(
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        _packed_int(4, is_symmetric=False),
    ),
    "compressed int8, packed": Format(
        compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=32, symmetric=True),
        _packed_int(8, is_symmetric=True),
    ),
    "compressed int8": Format(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), _int8
    ),
    "compressed FP8": Format(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        _fp8("weight_scale", None),
    ),
    "compressed MXFP4": Format(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True),
        _mxfp4,
    ),
}
"""Every format that is served from safetensors."""
