"""The adapters of a real model, in the form in which its products take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from twostroke.base.errors import UnsupportedFeature
from twostroke.kernels.cpu.low_rank import LowRankTensors, NativeAdapter
from twostroke.kernels.products.linear import Linears
from twostroke.models.adapters.peft import Adapter
from twostroke.models.adapters.products import TorchAdapter
from twostroke.models.adapters.shapes import ProjectionShapes
from twostroke.models.adapters.shared_out import share_of_adapter, share_of_factors
from twostroke.models.families.gemma2 import GEMMA2
from twostroke.models.families.gemma3 import GEMMA3
from twostroke.models.families.llama import LLAMA
from twostroke.models.families.mistral import MISTRAL
from twostroke.models.families.phi3 import PHI3
from twostroke.models.families.qwen2 import QWEN2
from twostroke.models.families.qwen3 import QWEN3
from twostroke.models.families.table import named
from twostroke.models.page_forms.balanced_keys import row_factors
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.formats import open_weights

ADAPTED: Final = tuple(family.architecture for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3))
"""Families with the seven projections of `ProjectionShapes` in every layer, whose rows lie as in their files."""


class ModelAdapters:
    """The `AdapterSlots` of a model, or of a share of it."""

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        linears: Linears | None,
    ) -> None:
        """`linears` makes products as the model's are made. None: the native forward pass computes them.

        Reads the model's files now, while they are those that the model was loaded from. Raises what opening them does.
        """
        self._directory = directory
        self._spec = spec
        self._dtype = dtype
        self._linears = linears
        self._shapes, self._whole_shapes = ProjectionShapes.of(spec), ProjectionShapes.of(spec.whole)
        self._prepared: dict[bytes, Any] = {}
        self._row_factors = self._read_row_factors()
        """Factors by which rows of the model's projections were multiplied: an adapter's rows are, too."""

    def prepare(self, adapter: Adapter) -> Any:
        """Raises UnsupportedFeature for a model whose adapters are not computed, and ConfigError for an adapter that
        does not fit."""
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

    def of(self, digests: Sequence[bytes | None]) -> tuple[Any, ...]:
        """Returns those of a step's sequences. Raises KeyError for one that was not put."""
        return tuple([None if digest is None else self._prepared[digest] for digest in digests])

    def _read_row_factors(self) -> Mapping[tuple[int, str], torch.Tensor]:
        if not self._spec.has_key_bias or self._spec.architecture not in ADAPTED:
            return {}
        whole, share = self._spec.whole, self._spec.share
        with open_weights(self._directory, self._dtype) as files:
            factors = row_factors(named(files, whole), whole)
        return factors if share is None else share_of_factors(factors, share)
