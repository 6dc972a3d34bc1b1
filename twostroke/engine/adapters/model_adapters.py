"""LoRA adapters of a real model, in the form in which its matrix products use them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from twostroke.base.errors import UnsupportedFeature
from twostroke.engine.adapters.over_ranks import OtherRankAdapters, RankedAdapters
from twostroke.engine.adapters.slots import AdapterSlots
from twostroke.engine.extras import Offers, OtherProcesses
from twostroke.kernels.products.linear import Linears
from twostroke.models.adapters.peft import Adapter, LowRank
from twostroke.models.adapters.products import StepAdapters, TorchAdapter
from twostroke.models.adapters.shapes import ProjectionShapes
from twostroke.models.families.gemma import GEMMA2, GEMMA3
from twostroke.models.families.llama import LLAMA, MISTRAL
from twostroke.models.families.phi3 import PHI3
from twostroke.models.families.qwen import QWEN2, QWEN3
from twostroke.models.families.table import named
from twostroke.models.page_forms.balanced_keys import row_factors
from twostroke.models.shares.share import Cut, cut_of
from twostroke.models.spec import ModelSpec, Share
from twostroke.models.weights.stored.formats import open_weights
from twostroke.scheduler.batch import Batch

ADAPTED: Final = tuple(family.architecture for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3))
"""Families whose adapters are computed: every layer has the seven projections of `ProjectionShapes`, with rows in the
order of the model's files."""
MLP_PROJECTIONS: Final = frozenset({"gate_proj", "up_proj", "down_proj"})
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
Key = tuple[int, str]
"""A layer's index, and the name of a projection in it."""


class ModelAdapters:
    """The `AdapterSlots` of a model, or of a share of it."""

    def __init__(self, directory: Path, spec: ModelSpec, dtype: torch.dtype, *, linears: Linears | None) -> None:
        """See `twostroke.engine.extras.ExtraOfModel`.

        Reads row factors from the model's files at once: later, other files may have replaced those that were loaded.
        Raises what opening them raises.
        """
        self._directory = directory
        self._spec = spec
        self._dtype = dtype
        self._linears = linears
        self._shapes, self._whole_shapes = ProjectionShapes.of(spec), ProjectionShapes.of(spec.whole)
        self._prepared: dict[bytes, Any] = {}
        self._row_factors = self._read_row_factors()
        """Factors that rows of the model's projections were multiplied by. An adapter's rows are multiplied by them,
        too."""

    def prepare(self, adapter: Adapter) -> Any:
        """Returns this process's share of the adapter, in the form that steps compute with.

        Raises UnsupportedFeature for a model whose adapters are not computed, and ConfigError for an adapter that does
        not fit.
        """
        self._check_computed()
        adapter.check_fits(self._whole_shapes)
        if self._spec.share is not None:
            adapter = share_of_adapter(adapter, self._spec.share)
        if self._linears is not None:
            return TorchAdapter(
                adapter,
                self._shapes,
                self._linears,
                dtype=self._dtype,
                row_factors=self._row_factors,
            )
        parts = {}
        for key, part in adapter.parts.items():
            b, factors = torch.from_numpy(part.b), self._row_factors.get(key)
            if factors is not None:
                b = b * factors[:, None].to(b.dtype)
            parts[key] = LowRankTensors(torch.from_numpy(part.a), b)
        return NativeAdapter(self._spec.layers, parts, adapter.scale)

    def _check_computed(self) -> None:
        if self._spec.architecture not in ADAPTED:
            raise UnsupportedFeature(
                f"adapters of {self._spec.architecture} are not computed; those of {', '.join(ADAPTED)} are"
            )

    def put(self, digest: bytes, prepared: Any) -> None:
        self._prepared[digest] = prepared

    def drop(self, digest: bytes) -> None:
        del self._prepared[digest]

    def of_step(self, batch: Batch) -> StepAdapters | torch.Tensor | None:
        """Returns what adapters add to this step. Raises KeyError for an adapter that was not put."""
        if not batch.weights:
            return None
        found = [None if digest is None else self._prepared[digest] for digest in batch.weights]
        return added(found, batch.query_starts.tolist())

    def offers(self, others: OtherProcesses | None) -> Offers:
        return {AdapterSlots: self if others is None else RankedAdapters(self, others)}

    def receiver(self) -> OtherRankAdapters:
        return OtherRankAdapters(self)

    def _read_row_factors(self) -> Mapping[tuple[int, str], torch.Tensor]:
        if not self._spec.has_key_bias or self._spec.architecture not in ADAPTED:
            return {}
        whole, share = self._spec.whole, self._spec.share
        with open_weights(self._directory, self._dtype) as files:
            factors = row_factors(named(files, whole), whole)
        return factors if share is None else share_of_factors(factors, share)


class NativeLowRank(ctypes.Structure):
    """`LowRank` of native/low_rank.h, field by field."""

    _fields_ = (
        ("a", _POINTER),
        ("b", _POINTER),
        ("inner", _NUMBER),
        ("inputs", _NUMBER),
        ("outputs", _NUMBER),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_float),
    )


PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class NativeAdapterLayer(ctypes.Structure):
    """`AdapterLayer` of native/low_rank.h."""

    _fields_ = tuple((name, NativeLowRank) for name in PROJECTIONS)


@dataclass(frozen=True, slots=True, eq=False)
class LowRankTensors:
    a: torch.Tensor
    """[inner, inputs]"""
    b: torch.Tensor
    """[outputs, inner]"""


class NativeAdapter:
    """One adapter in bfloat16. It must not be freed while a forward pass uses its address."""

    def __init__(self, layers: int, parts: Mapping[tuple[int, str], LowRankTensors], scale: float) -> None:
        self._keep: list[Any] = []
        self._layers = (NativeAdapterLayer * layers)()
        for (layer, name), part in parts.items():
            a, b = part.a.bfloat16().contiguous(), part.b.bfloat16().T.contiguous()
            self._keep += [a, b]
            sizes = {"inner": a.shape[0], "inputs": a.shape[1], "outputs": b.shape[1]}
            native = NativeLowRank(a=a.data_ptr(), b=b.data_ptr(), scale=scale, **sizes)
            setattr(self._layers[layer], name, native)
        self.address = ctypes.addressof(self._layers)


def added(
    adapters: Sequence[TorchAdapter | NativeAdapter | None], query_starts: Sequence[int]
) -> StepAdapters | torch.Tensor | None:
    """Returns what the adapters of a step's sequences add to it; None where no sequence has an adapter.

    A native forward pass takes the address of an adapter for each row: int64 [tokens], 0 for none.
    """
    if not any(adapters):
        return None
    counts = [end - start for start, end in itertools.pairwise(query_starts)]
    if any(isinstance(adapter, NativeAdapter) for adapter in adapters):
        addresses = [adapter.address if isinstance(adapter, NativeAdapter) else 0 for adapter in adapters]
        return torch.tensor(addresses).repeat_interleave(torch.tensor(counts))
    of_torch = [adapter if isinstance(adapter, TorchAdapter) else None for adapter in adapters]
    return StepAdapters([each for each, count in zip(of_torch, counts, strict=True) for _ in range(count)])


def share_of_adapter(adapter: Adapter, share: Share) -> Adapter:
    """Returns a process's share of an adapter, which fits the whole model."""
    return replace(adapter, parts={key: _part(part, _cut(key, share)) for key, part in adapter.parts.items()})


def share_of_factors(factors: dict[Key, torch.Tensor], share: Share) -> dict[Key, torch.Tensor]:
    """Returns the factors of the rows that a process has, out of those of the whole model."""
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
    module = "mlp" if projection in MLP_PROJECTIONS else "self_attn"
    cut = cut_of(share, f"model.layers.{layer}.{module}.{projection}.weight")
    assert cut is not None, "shares cut every projection that an adapter may change"
    return cut
