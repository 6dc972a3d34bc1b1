"""Opens the weight files of a model directory, in whichever format they are."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from twostroke.models.weights.files import TensorFiles
from twostroke.models.weights.stored.coded import CodedTensors
from twostroke.models.weights.stored.coded_matrices import coded_in
from twostroke.models.weights.stored.gguf import GgufTensors
from twostroke.models.weights.stored.model_files import gguf_in
from twostroke.models.weights.tensors import WeightSource


class OpenWeights(WeightSource, Protocol):
    """The files of a model, open while tensors are read."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


def open_weights(
    directory: Path, dtype: torch.dtype, device: torch.device | None = None, *, keeps_codes: bool = False
) -> OpenWeights:
    """Returns the weights of a model directory in whichever format it has.

    Matrices become plain numbers of `dtype`, or stay quantised where `keeps_codes` is true. Raises ConfigError naming
    the file that cannot be read.
    """
    gguf = gguf_in(directory)
    if gguf is not None:
        return GgufTensors(gguf, dtype, device, keeps_codes=keeps_codes)
    coded = coded_in(directory)
    if coded is not None:
        return CodedTensors(directory, coded, dtype, device, keeps_codes=keeps_codes)
    return TensorFiles(directory, dtype, device)
