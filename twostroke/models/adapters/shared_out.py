"""The part of an adapter that one process of a worker has: of each pair of matrices the one that meets what it cuts.

A process with some of the outputs of a product has those rows of B. One with some of the inputs has those columns of A.
The sum over processes carries what the latter add.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from twostroke.models.adapters.peft import Adapter, LowRank
from twostroke.models.shares.share import Cut, cut_of
from twostroke.models.spec import Share

Key = tuple[int, str]
"""A layer and a projection."""


def share_of_adapter(adapter: Adapter, share: Share) -> Adapter:
    """Returns what a process adds of an adapter that fits the whole model."""
    return replace(adapter, parts={key: _part(part, _cut(key, share)) for key, part in adapter.parts.items()})


def share_of_factors(factors: dict[Key, torch.Tensor], share: Share) -> dict[Key, torch.Tensor]:
    """Returns the factors of the rows that a process has of each projection, of those of the whole model."""
    return {key: each[_own(_cut(key, share), len(each))] for key, each in factors.items()}


def _part(part: LowRank, cut: Cut) -> LowRank:
    if cut.by_columns:
        return LowRank(part.a[:, _own(cut, part.a.shape[1])], part.b)
    return LowRank(part.a, part.b[_own(cut, len(part.b))])


def _own(cut: Cut, whole: int) -> slice:
    own = cut.of(whole)
    return slice(own.start, own.stop)


def _cut(key: Key, share: Share) -> Cut:
    layer, projection = key
    module = "mlp" if projection in _OF_MLP else "self_attn"
    cut = cut_of(share, f"model.layers.{layer}.{module}.{projection}.weight")
    assert cut is not None, "shares cut every projection that an adapter may change"
    return cut


_OF_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
