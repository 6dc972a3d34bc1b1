"""The part that one rank of a worker has of a model's weights, and of the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from twostroke.errors import ConfigError
from twostroke.kernels.stored import Matrix, StoredMatrix
from twostroke.kv_cache.form import RankedForm
from twostroke.models.spec import ModelSpec, Share
from twostroke.models.weights.tensors import WeightSource


def shared_out(source: WeightSource, spec: ModelSpec) -> WeightSource:
    """Return the source of a rank's weights: `source`, which has those of the whole model, where there is one rank."""
    if spec.share is None:
        return source
    return _SharedSource(source, spec.share, _units(spec.share))


def _units(share: Share) -> Mapping[str, tuple[int, range]]:
    """Return, by module or tensor, into how many parts its rows or columns are cut, and which of them a rank has."""
    whole = share.whole
    heads = whole.heads, share.of(whole.heads)
    kv_heads = whole.kv_heads, share.of(whole.kv_heads)
    widths = share.ranks, range(share.rank, share.rank + 1)
    mlps = {f"{mlp}.{part}_proj": widths for mlp in ("mlp", "mlp.shared_expert") for part in ("gate", "up", "down")}
    return {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"), heads),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), kv_heads),
        "self_attn.sinks": heads,
        **mlps,
    }


BY_COLUMNS: Final = ("o_proj", "down_proj")
"""Products whose inputs are shared out, and whose results are parts of a sum. Their biases are the first rank's."""


@dataclass(frozen=True, slots=True)
class _SharedSource:
    source: WeightSource
    """The weights of the whole model, by our names."""
    share: Share
    units: Mapping[str, tuple[int, range]]

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises what the source raises."""
        found = self._units_of(name)
        if found is None:
            return self.source.take(name, *shape)
        count, own = found
        if name.endswith(".bias") and self._is_by_columns(name):
            bias = self.source.take(name, *shape)
            return bias if self.share.rank == 0 else torch.zeros_like(bias)
        axis = int(self._is_by_columns(name))
        unit = shape[axis] // len(own)
        whole = (*shape[:axis], unit * count, *shape[axis + 1 :])
        return self.source.take(name, *whole).narrow(axis, own.start * unit, shape[axis]).contiguous()

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Raises what the source raises, and ConfigError for a matrix of codes."""
        found = self._units_of(name)
        if found is None:
            return self.source.take_matrix(name, rows, inputs)
        count, own = found
        shape = (rows, inputs * count // len(own)) if self._is_by_columns(name) else (rows * count // len(own), inputs)
        if isinstance(self.source.take_matrix(name, *shape), StoredMatrix):
            raise ConfigError(
                f"--tp {self.share.ranks}: quantised weights are not shared out over ranks; take plain ones",
                field="--tp",
            )
        return self.take(name, rows, inputs)

    def _units_of(self, name: str) -> tuple[int, range] | None:
        _, is_layer, rest = name.partition("model.layers.")
        tensor = rest.partition(".")[2]
        return self.units.get(tensor, self.units.get(tensor.rpartition(".")[0])) if is_layer else None

    def _is_by_columns(self, name: str) -> bool:
        return name.rpartition(".")[0].endswith(BY_COLUMNS)


def pages_of_share(regions: Sequence[torch.Tensor], form: RankedForm, share: Share) -> list[torch.Tensor]:
    """Return the rank's part of the pages of each group, uint8 [pages, bytes of its part], of [pages, page bytes]."""
    kv_heads = share.whole.kv_heads
    ranges = form.ranges(kv_heads)
    index = share.of(kv_heads).start * ranges // kv_heads
    return [region.chunk(ranges, dim=1)[index] for region in regions]
