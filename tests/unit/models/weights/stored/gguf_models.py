"""GGUF files of small models with random weights, as llama.cpp's converter writes them, by the `gguf` package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from tests.unit.models.test_registry import saved

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
MIXED: Final = ("Q4_1", "Q8_0", "Q4_0", "Q5_0")
"""Types of a file's matrices in turn."""
NUMBERS: Final = ("norm.weight", ".bias", "_bias", ".sinks", "mlp.gate.weight", "router.weight", "expert_gate.weight")
"""Ends of names of tensors that converters leave in float32, routers among them."""
_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(\w+\.weight)")

Tensors = dict[str, torch.Tensor]


def written(
    config: PreTrainedConfig,
    architecture: str,
    directory: Path,
    types: tuple[str, ...] = MIXED,
    meaning: Path | None = None,
    *,
    omits_kv_heads: bool = False,
) -> Path:
    """Saves the model's config beside `model.gguf`, whose matrices have these types in turn, and returns that file.

    A model of transformers with the numbers of that file is saved in `meaning`. `omits_kv_heads`: the file does not say
    how many heads keys have, which are then as many as queries have.
    """
    saved(config, directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(config.num_attention_heads)
    if not omits_kv_heads:
        writer.add_head_count_kv(config.num_key_value_heads)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(MODEL_ARCH(arch), config.num_hidden_layers)
    stored: Tensors = {}
    for number, (name, tensor) in enumerate(_of_layers(tensors)):
        stem, _, kind = name.rpartition(".")
        if kind == "sinks":
            stem, kind = name, "weight"
        found = names.get_name(stem)
        assert found is not None, f"the converter does not know {name}"
        values = _converted(tensor.float(), name, architecture, config)
        is_plain = name.endswith(NUMBERS) or "block_sparse_moe.gate" in name
        type_ = GGMLQuantizationType["F32" if is_plain else types[number % len(types)]]
        content = quants.quantize(values.numpy(), type_)
        writer.add_tensor(f"{found}.{kind}", content, raw_dtype=type_)
        meant = torch.from_numpy(quants.dequantize(content, type_).reshape(values.shape).copy())
        stored[name] = _converted(meant, name, architecture, config, back=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if meaning is not None:
        config.save_pretrained(meaning)
        save_file({name: each.contiguous() for name, each in _as_saved(stored, tensors)}, meaning / "model.safetensors")
    return path


def _of_layers(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a model's tensors, those of all experts of a layer as one, gates and values apart."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is not None:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        elif ".experts.gate_up_proj" in name:
            outputs = tensor.transpose(1, 2) if tensor.ndim == 3 else tensor
            kind = "bias" if name.endswith("_bias") else "weight"
            for part, turn in (("gate", 0), ("up", 1)):
                yield f"{name.partition('.gate_up')[0]}.{part}_proj.{kind}", outputs[:, turn::2].contiguous()
        elif ".experts.down_proj" in name:
            outputs = tensor.transpose(1, 2).contiguous() if tensor.ndim == 3 else tensor
            yield f"{name.partition('.down')[0]}.down_proj.{'bias' if name.endswith('_bias') else 'weight'}", outputs
        else:
            yield name, tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[number] for number in sorted(parts)])


def _as_saved(stored: Tensors, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what was stored as the tensors of the model's own file."""
    for name in tensors:
        found = _EXPERT.fullmatch(name)
        if found is not None:
            yield name, stored[f"{found[1]}.{found[3]}"][int(found[2])]
        elif ".experts." in name:
            block, kind = name.partition(".experts.")[0] + ".experts", "bias" if name.endswith("_bias") else "weight"
            if "gate_up" in name:
                gates, values = (stored[f"{block}.{part}_proj.{kind}"] for part in ("gate", "up"))
                both = torch.stack((gates, values), dim=2).flatten(1, 2)
            else:
                both = stored[f"{block}.down_proj.{kind}"]
            yield name, both.transpose(1, 2) if both.ndim == 3 else both
        else:
            yield name, stored[name]


def _converted(
    tensor: torch.Tensor, name: str, architecture: str, config: PreTrainedConfig, *, back: bool = False
) -> torch.Tensor:
    """Returns what a converter makes of a tensor: pairs in heads of Llama, norms of Gemma plus 1, rows as vectors."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1 if back else tensor + 1
    if name.endswith("shared_expert_gate.weight"):
        return tensor[None] if back else tensor[0]
    if architecture != "llama" or not (".q_proj" in name or ".k_proj" in name):
        return tensor
    heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
    half = len(tensor) // heads // 2
    parts = tensor.reshape(heads, *((half, 2) if back else (2, half)), *tensor.shape[1:])
    return parts.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def random_blocks(rows: int, blocks: int, block_bytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of blocks whose scales are small."""
    draw = np.random.default_rng(seed)
    content = draw.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    content[:, :, 1] = 0x20 + content[:, :, 1] % 8
    content[:, :, 3] = 0x20 + content[:, :, 3] % 8
    content[:, :, 0] = 120 + content[:, :, 0] % 8
    content[:, :, -1] = 0x20 + content[:, :, -1] % 8
    return content
