"""Checks that a model's weight files can be served, before a launcher starts a worker. No torch here.

It checks headers, places of tensors, shapes of the parts of each quantised matrix, and every scale. Files are read,
never run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from twostroke.base.errors import ConfigError
from twostroke.models.weights.stored.coded_matrices import SCALES, CodedMatrices, coded_in
from twostroke.models.weights.stored.gguf_file import TYPES, GgufFile, GgufTensor, check_architecture, read_gguf
from twostroke.models.weights.stored.model_files import gguf_in
from twostroke.models.weights.stored.tensor_header import HeaderTensor, read_headers

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

EXPONENT_BITS: Final = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}
"""All bits of the exponent, by dtype. A number that has them all is infinite or NaN."""
NO_EXPONENT: Final = 255
"""The only scale of one byte (E8M0) that is not a number."""


def check_weights(directory: Path) -> None:
    """Raises ConfigError, one line that names what is wrong, where the weights of a directory cannot be served."""
    gguf = gguf_in(directory)
    if gguf is not None:
        check_gguf(gguf)
        return
    read_headers(directory)
    coded = coded_in(directory)
    if coded is not None:
        _check_coded(coded)


def check_gguf(path: Path) -> None:
    """Raises ConfigError as `check_weights` does, for a GGUF file."""
    file = read_gguf(path)
    check_architecture(file)
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{path} has no tensor token_embd.weight", field="model")
    content = np.memmap(path, np.uint8, "r")
    for tensor in file.tensors.values():
        if _has_wrong_scale(content[tensor.start : tensor.start + tensor.size_bytes], tensor):
            raise _no_number(file.path, tensor.name)
    _check_heads(file)


def check_describes_itself(path: Path) -> None:
    """Raises ConfigError where a GGUF file lacks a part of the model's config, or has it in a form that we do not
    read."""
    file = read_gguf(path)
    scaling = file.facts.get(f"{file.architecture}.rope.scaling.type", "none")
    lost = [name for name in file.tensors if name.startswith("rope_f")]
    if scaling != "none" and file.architecture != "gpt-oss":
        lost.append(f"{file.architecture}.rope.scaling.type")
    if file.architecture == "llama" and file.facts.get("llama.expert_count"):
        lost.append("llama.expert_count")
    if lost:
        raise ConfigError(
            f"{path}: {lost[0]} is only served with the model's config.json and tokenizer.json beside the file",
            field="model",
        )


def _check_heads(file: GgufFile) -> None:
    for count in ("head_count", "head_count_kv"):
        key = f"{file.architecture}.attention.{count}"
        heads = file.facts.get(key)
        if heads is not None and (not isinstance(heads, int) or not 0 < heads < 1 << 16):
            raise ConfigError(f"{file.path}: {key} is {heads!r}", field="model")


def _has_wrong_scale(content: Bytes, tensor: GgufTensor) -> bool:
    if tensor.layout is None:
        return len(tensor.shape) == 1 and _has_wrong_number(content, tensor.kind)
    blocks = content.reshape(-1, tensor.block_bytes)
    if tensor.layout.scales == "exponent":
        return bool((blocks[:, 0] == NO_EXPONENT).any())
    return any(_has_wrong_number(blocks[:, at : at + 2], "F16") for at in TYPES[tensor.kind].numbers)


def _has_wrong_number(content: Bytes, dtype: str) -> bool:
    whole, mask = np.ascontiguousarray(content), EXPONENT_BITS[dtype]
    if dtype == "F32":
        return bool((whole.view(np.uint32) & mask == mask).any())
    return bool((whole.view(np.uint16) & mask == mask).any())


def _check_coded(coded: CodedMatrices) -> None:
    for name in coded.modules():
        matrix = coded.find(name)
        assert matrix is not None, "its codes are there"
        for part, tensor in matrix.parts.items():
            if "scale" not in part:
                continue
            content = _content(tensor)
            is_wrong = (
                _has_wrong_number(content, tensor.dtype)
                if tensor.dtype in SCALES
                else bool((content == NO_EXPONENT).any())
            )
            if is_wrong:
                raise _no_number(coded.directory, f"{name.removesuffix('.weight')}.{part}")


def _content(tensor: HeaderTensor) -> Bytes:
    count = math.prod(tensor.shape)
    if not count:
        return np.zeros(0, np.uint8)
    return np.memmap(tensor.path, np.uint8, "r", tensor.start, (tensor.size_bytes,))


def _no_number(path: Path, name: str) -> ConfigError:
    return ConfigError(f"{path}: tensor {name} has a scale that is not a number", field="model")
