"""Which share of a model each rank of a worker has, as far as the model's files say it."""

from __future__ import annotations

from pathlib import Path

import torch

from twostroke.models.families.table import layouts_named, named
from twostroke.models.shares.share import cut_by_columns, shares_of
from twostroke.models.shares.shared_out import shared_out
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.formats import open_weights
from twostroke.models.weights.stored.model_files import LayoutOf, layouts_in


def shares_in(
    directory: Path, spec: ModelSpec, ranks: int, *, is_int8: bool, flag: str = "--tp"
) -> tuple[ModelSpec, ...]:
    """Returns the share that each rank has of the model in a directory, as `shares_of` does. Reads only headers."""
    return shares_of(spec, ranks, None if ranks == 1 else _layouts(directory, spec), is_int8=is_int8, flag=flag)


def check_orders(directory: Path, share: ModelSpec) -> None:
    """Raises ConfigError for a matrix that is divided by columns, where a group has inputs from all over the matrix."""
    layouts = _layouts(directory, share.whole)
    if layouts is None:
        return
    with open_weights(directory, torch.bfloat16, keeps_codes=True) as files:
        source = shared_out(named(files, share.whole), share)
        for name, inputs in cut_by_columns(share):
            if layouts(name) is not None:
                source.take_matrix(name, share.hidden_size, inputs)


def _layouts(directory: Path, spec: ModelSpec) -> LayoutOf | None:
    layouts = layouts_in(directory)
    return None if layouts is None or spec.generic is not None else layouts_named(layouts, spec)
