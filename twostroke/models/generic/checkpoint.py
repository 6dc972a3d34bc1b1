"""The weights of a generic model, which transformers loads; an error names in one line what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging as their_logging

from twostroke.base.errors import ConfigError
from twostroke.models.checks.unread_tensors import check_left
from twostroke.models.generic.interface import PAGED, register
from twostroke.models.weights.stored.model_files import gguf_in
from twostroke.models.weights.stored.tensor_header import read_headers

PLAIN: Final = {"F64", "F32", "F16", "BF16"}
"""Dtypes of tensors that are not quantised."""
NAMED: Final = 3
"""Most names of tensors in one message."""


def load_checkpoint(
    directory: Path, dtype: torch.dtype, *, with_head: bool, device: str | None = None
) -> tuple[Any, str | None]:
    """Returns the model with its weights, and a sentence on tensors that nothing reads, if any.

    `with_head`: whether the model has its head. On the device "meta", only headers of the weights are read.

    Raises ConfigError with one line for weights that are missing, misshapen, of another type, or unreadable. It does
    the same for tensors in the model's modules with which nothing is computed.
    """
    check_headers(directory)
    register()
    their_logging.disable_progress_bar()
    their_logging.set_verbosity_error()
    kind = AutoModelForCausalLM if with_head else AutoModel
    try:
        model, info = kind.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=PAGED,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            device_map=device,
        )
    except Exception as error:  # it raises whatever damaged files lead to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"weights in {directory} cannot be read: {reason}", field="model") from error
    if info["missing_keys"]:
        raise _wrong(directory, "no tensor", info["missing_keys"])
    if info["mismatched_keys"]:
        wrong = info["mismatched_keys"]
        shapes = [f"{name} of shape {tuple(own)}, the config says {tuple(wanted)}" for name, own, wanted in wrong]
        raise _wrong(directory, "other shapes:", shapes)
    if info.get("error_msgs"):
        raise _wrong(directory, "errors:", info["error_msgs"])
    if device is None:
        _detach(model)
    note = check_left(directory, info["unexpected_keys"], model.state_dict()) if with_head else None
    return model.eval(), note


def _detach(model: Any) -> None:
    """Copies all weights out of the model's files, which may be written to while the model is served."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def check_headers(directory: Path) -> None:
    """Raises ConfigError for files that transformers' code does not compute as they are stored. Reads only headers."""
    gguf = gguf_in(directory)
    if gguf is not None:
        raise ConfigError(
            f"{gguf}: a GGUF file of a model without a family of ours is not served; give its safetensors files",
            field="model",
        )
    for name, tensor in read_headers(directory).items():
        if tensor.dtype not in PLAIN:
            raise ConfigError(
                f"{directory}: tensor {name} has type {tensor.dtype}, which is served only where "
                "quantization_config says what it means",
                field="model",
            )


def _wrong(directory: Path, what: str, names: Collection[str]) -> ConfigError:
    few = ", ".join(" ".join(name.split()) for name in sorted(names)[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ConfigError(f"weights in {directory} have {what} {few}{more}", field="model")
