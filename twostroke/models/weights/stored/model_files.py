"""Finds the layouts of a model's matrices. It reads only the headers of its files. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twostroke.base.errors import ConfigError
from twostroke.kernels.layout import Layout
from twostroke.models.weights.stored.coded_matrices import coded_in
from twostroke.models.weights.stored.gguf_file import check_architecture, read_gguf
from twostroke.models.weights.stored.gguf_names import gguf_place

GGUF_SUFFIX = ".gguf"

LayoutOf = Callable[[str], Layout | None]
"""Returns the layout of the matrix of a name; None for plain numbers."""


def gguf_in(directory: Path) -> Path | None:
    """Returns the GGUF file that holds the model's weights; None where safetensors do.

    Raises ConfigError where it has several, because nothing says which one is meant.
    """
    if any(directory.glob("*.safetensors")):
        return None
    found = sorted(directory.glob(f"*{GGUF_SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"model directory {directory} has several GGUF files ({names}): name one", field="model")
    return found[0] if found else None


def layouts_in(directory: Path) -> LayoutOf | None:
    """Returns the layouts of a model's matrices; None where all of them are plain numbers.

    Raises ConfigError where the files are damaged.
    """
    gguf = gguf_in(directory)
    if gguf is not None:
        return layouts_of_gguf(gguf)
    coded = coded_in(directory)
    if coded is None:
        return None

    def layout_of(name: str) -> Layout | None:
        matrix = coded.find(name)
        return None if matrix is None else matrix.layout

    return layout_of


def layouts_of_gguf(path: Path) -> LayoutOf:
    """Returns the layouts of a GGUF file's matrices. Raises ConfigError where it is damaged."""
    file = read_gguf(path)
    check_architecture(file)

    def layout_of(name: str) -> Layout | None:
        tensor = file.find(gguf_place(file.architecture, name))
        return None if tensor is None else tensor.layout

    return layout_of
