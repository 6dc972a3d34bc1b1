"""The default model cut short: a draft model for it, or a model of its own that costs less. It is real, if not good."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYERS = 16
"""Layers that are kept of 30: they agree with the whole model in one token of eight, and cost little enough."""
OTHER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def save_first_layers(model: Path, directory: Path, layers: int = LAYERS) -> Path:
    """Writes the first layers of the model in one directory to another, in bfloat16, and returns that."""
    config = json.loads((model / "config.json").read_text())
    left_out = tuple(f"model.layers.{layer}." for layer in range(layers, config["num_hidden_layers"]))
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items() if not name.startswith(left_out)}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "dtype": "bfloat16"}))
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    for name in OTHER_FILES:
        shutil.copyfile(model / name, directory / name)
    return directory
