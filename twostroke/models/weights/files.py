"""All safetensors files of a model directory as one name space of tensors, read lazily."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from twostroke.errors import ConfigError
from twostroke.kernels.stored import Matrix
from twostroke.models.weights.fused_experts import FusedExpert

EXACT: Final = ".e_score_correction_bias"
"""The end of names of tensors that stay float32 in every dtype: rounded, they would choose other experts."""


class TensorFiles(ExitStack):
    """Raises ConfigError naming the file that cannot be read, or a tensor that is missing or misshapen."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                file = self.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of this name, on the device and in the dtype asked for.

        Files of a model that was saved without its head may leave the first part of all names away. A file may have the
        weights of all experts of a layer in one tensor.
        """
        headless = name.partition(".")[2]
        if name not in self._file_of and headless in self._file_of:
            name = headless
        fused = FusedExpert.of(name, self._file_of)
        if name not in self._file_of and fused is not None and fused.name in self._file_of:
            part = self._file_of[fused.name].get_slice(fused.name)
            return self._checked(name, fused.take(part), shape)
        if name not in self._file_of:
            raise ConfigError(f"weights in {self._directory} have no tensor {name}", field="model")
        return self._checked(name, self._file_of[name].get_tensor(name), shape)

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
        """The same: these files hold plain numbers."""
        return self.take(name, rows, inputs)
