"""All safetensors files of a model directory as one name space of tensors, read lazily."""

from __future__ import annotations

from collections.abc import Container
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from twostroke.base.errors import ConfigError
from twostroke.kernels.products.stored import Matrix
from twostroke.models.weights.fused_experts import FusedExpert
from twostroke.models.weights.stored.tensor_header import weight_files

EXACT: Final = ".e_score_correction_bias"
"""Ending of the names of tensors that stay float32 in every dtype: rounded, they would choose other experts."""


class TensorFiles(ExitStack):
    """The tensors of a directory's safetensors files.

    Raises ConfigError naming a file that cannot be read, or a tensor that is missing or misshapen.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Any] = {}
        files = weight_files(directory)
        for path in files.paths:
            try:
                file = self.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
            self._file_of.update({name: file for name in file.keys() if files.has(name, path)})  # noqa: SIM118

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Returns the tensor of this name, on the requested device and in the requested dtype.

        If a model was saved without its head, the files may leave out the first part of all names. A file may have the
        weights of all experts of a layer in one tensor.
        """
        place = stored_name(name, self._file_of)
        fused = FusedExpert.of(place, self._file_of)
        if place not in self._file_of and fused is not None and fused.name in self._file_of:
            part = self._file_of[fused.name].get_slice(fused.name)
            return self._checked(name, fused.take(part), shape)
        if place not in self._file_of:
            raise ConfigError(f"weights in {self._directory} have no tensor {name}", field="model")
        return self._checked(place, self._file_of[place].get_tensor(place), shape)

    def _checked(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if tensor.shape != shape:
            raise ConfigError(
                f"{self._directory}: tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}",
                field="model",
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise ConfigError(
                f"{self._directory}: tensor {name} has type {tensor.dtype}, which is served only where "
                "quantization_config says what it means",
                field="model",
            )
        return tensor.to(self._device, torch.float32 if name.endswith(EXACT) else self._dtype)

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Returns what `take` returns: these files hold plain numbers."""
        return self.take(name, rows, inputs)


def stored_name(name: str, names: Container[str]) -> str:
    """Returns the name of a tensor in files with tensors of these names. Files of a model without its head may leave
    out its first part."""
    headless = name.partition(".")[2]
    return headless if name not in names and headless in names else name
