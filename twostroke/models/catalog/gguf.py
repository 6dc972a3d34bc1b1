"""Turns a GGUF file into a model directory: `python -m twostroke.models.catalog.gguf FILE DIRECTORY DTYPE`.

Weights are dequantised into DTYPE. With "header" in its place, everything but the weights is written. This runs in a
process of its own. So a launcher that fetches a model never loads torch, and the memory is freed at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def convert(gguf_file: Path, directory: Path, dtype: str) -> None:
    """Writes config.json, generation_config.json, tokenizer files and model.safetensors into `directory`."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).to(getattr(torch, dtype))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    del config.quantization_config
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def describe(gguf_file: Path, directory: Path) -> None:
    """Writes config.json, generation_config.json and tokenizer files into `directory`."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)
    config = AutoConfig.from_pretrained(**where)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)


if __name__ == "__main__":
    if sys.argv[3] == "header":
        describe(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
