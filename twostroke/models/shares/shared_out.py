"""The share that one rank of a worker has of a model's weights and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.base.errors import ConfigError
from twostroke.kernels.products.stored import Matrix, StoredMatrix
from twostroke.kv_cache.form import AnyForm, JointForm
from twostroke.models.families.table import layouts_named, named
from twostroke.models.shares.share import Cut, cut_by_columns, cut_layout, cut_of, shares_of
from twostroke.models.spec import ModelSpec, Share
from twostroke.models.weights.stored.model_files import LayoutOf, layouts_in
from twostroke.models.weights.tensors import WeightSource


def shared_out(source: WeightSource, spec: ModelSpec) -> WeightSource:
    """Returns the source of a rank's weights. `source` has those of the whole model, and is returned where there is one
    rank."""
    return source if spec.share is None else _SharedSource(source, spec.share)


@dataclass(frozen=True, slots=True)
class _SharedSource:
    source: WeightSource
    """The weights of the whole model, by our names."""
    share: Share

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises what the source raises."""
        cut = cut_of(self.share, name)
        if cut is None:
            return self.source.take(name, *shape)
        if cut.by_columns and name.endswith(".bias"):
            bias = self.source.take(name, *shape)
            return bias if self.share.is_first else torch.zeros_like(bias)
        axis = int(cut.by_columns)
        return _narrowed(self.source.take(name, *shape[:axis], cut.whole(shape[axis]), *shape[axis + 1 :]), cut)

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Raises what the source raises, and ConfigError for a quantised matrix that cannot be divided so."""
        cut = cut_of(self.share, name)
        if cut is None:
            return self.source.take_matrix(name, rows, inputs)
        shape = (rows, cut.whole(inputs)) if cut.by_columns else (cut.whole(rows), inputs)
        whole = self.source.take_matrix(name, *shape)
        if isinstance(whole, torch.Tensor):
            return _narrowed(whole, cut)
        if whole.layout.can_pack(whole.inputs):
            return _part(whole, cut, self.share, name)
        # No kernel multiplies with its codes, so it becomes plain numbers, as with one rank.
        return self.take(name, rows, inputs)


def _narrowed(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    axis = int(cut.by_columns)
    own = cut.of(whole.shape[axis])
    part = whole.narrow(axis, own.start, len(own))
    return part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole tensor in memory


def _part(whole: StoredMatrix, cut: Cut, share: Share, name: str) -> StoredMatrix:
    if not cut.by_columns:
        own = cut.of(whole.rows)
        return whole.picked(torch.arange(own.start, own.stop))
    layout = cut_layout(whole.layout, whole.inputs, cut, share, name)
    if whole.order is not None:
        raise ConfigError(
            f"--tp {share.count}: the groups of {name.removesuffix('.weight')} take their inputs from all over its "
            f"{whole.inputs} (g_idx), so that its columns cannot be shared out",
            field="--tp",
        )
    return whole.of_inputs(cut.of(whole.inputs), layout)


def form_of_share(form: AnyForm, share: Share | None) -> AnyForm:
    """Returns the form of a rank's part of the pages: the form itself where there is one rank."""
    if share is None:
        return form
    assert isinstance(form, JointForm), "pages say how many ranks share them"
    return form.inner


def pages_of_share(regions: Sequence[torch.Tensor], form: AnyForm, share: Share) -> tuple[list[torch.Tensor], AnyForm]:
    """Returns the rank's part of the pages of each group, and its form.

    Each group's `region` is [pages, page bytes]; the part is uint8 [pages, bytes of the part].
    """
    assert isinstance(form, JointForm), "pages say how many ranks share them"
    kv_heads = share.whole.kv_heads
    ranges = form.ranges(kv_heads)
    index = share.of(kv_heads).start * ranges // kv_heads
    return [region.chunk(ranges, dim=1)[index] for region in regions], form.inner


def shares_in(
    directory: Path, spec: ModelSpec, ranks: int, *, is_int8: bool, flag: str = "--tp"
) -> tuple[ModelSpec, ...]:
    """Returns the share of each rank of the model in a directory, as `shares_of` does. Reads only headers."""
    return shares_of(spec, ranks, None if ranks == 1 else _layouts(directory, spec), is_int8=is_int8, flag=flag)


def check_orders(directory: Path, share: ModelSpec) -> None:
    """Raises ConfigError for a matrix that is divided by columns and whose groups take inputs from all over it."""
    from twostroke.models.weights.stored.formats import open_weights  # programs that read no file do without it

    layouts = _layouts(directory, share.whole)
    if layouts is None:
        return
    with open_weights(directory, torch.bfloat16, keeps_codes=True) as files:
        source = shared_out(named(files, share.whole), share)
        for name, inputs in cut_by_columns(share):
            if layouts(name) is not None:
                source.take_matrix(name, share.hidden_size, inputs)


def _layouts(directory: Path, spec: ModelSpec) -> LayoutOf | None:
    return layouts_named(layouts_in(directory), spec)
