"""What the bill says of a model's packed weights, and what their file takes."""

from __future__ import annotations

from pathlib import Path

from twostroke.models.families.table import layouts_named
from twostroke.models.memory_needs import stored_weights
from twostroke.models.registry import read_spec
from twostroke.models.weights.stored.model_files import layouts_in


def billed_bytes(directory: Path) -> int:
    """Returns what `twostroke bill` counts for the quantised weights of a directory."""
    layouts, spec = layouts_in(directory), read_spec(directory)
    assert layouts is not None
    return stored_weights(spec, layouts_named(layouts, spec)).total


def packed_bytes(folder: Path) -> int:
    """Returns the size of the only file of packed weights in the folder's cache."""
    (file,) = (folder / "cache" / "packed").glob("*.weights")
    return file.stat().st_size
