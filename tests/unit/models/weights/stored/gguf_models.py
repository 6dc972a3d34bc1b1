"""GGUF files of small models with random weights, written by the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from transformers import PreTrainedConfig

from tests.unit.models.test_registry import saved
from twostroke.models.weights.stored.gguf_names import gguf_name

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


def written(config: PreTrainedConfig, architecture: str, directory: Path, types: tuple[str, ...] = MIXED) -> Path:
    """Save the model's config beside `model.gguf`, whose matrices have these types in turn, and return that file."""
    model = saved(config, directory)
    (directory / "model.safetensors").unlink()
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for number, (name, tensor) in enumerate(state.items()):
        rows = _in_pairs(tensor, name, config) if architecture == "llama" else tensor
        values = rows.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        kind = GGMLQuantizationType[types[number % len(types)]]
        writer.add_tensor(gguf_name(name), quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _in_pairs(tensor: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """Queries and keys as llama.cpp's converter writes them: the halves of each head in pairs of neighbours."""
    if ".q_proj" not in name and ".k_proj" not in name:
        return tensor
    heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def random_blocks(rows: int, blocks: int, block_bytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of blocks whose scales are small."""
    draw = np.random.default_rng(seed)
    content = draw.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    content[:, :, 1] = 0x20 + content[:, :, 1] % 8
    content[:, :, 3] = 0x20 + content[:, :, 3] % 8
    content[:, :, 0] = 120 + content[:, :, 0] % 8
    content[:, :, -1] = 0x20 + content[:, :, -1] % 8
    return content
