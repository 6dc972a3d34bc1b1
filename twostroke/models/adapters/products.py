"""What adapters add to a model's matrix products in torch, row by row: y += (x A^T) B^T * scale.

The model's own products are not touched, so that rows without an adapter keep their bits. An adapter's products are
computed in the way of the model's, and only over the rows of that adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from twostroke.kernels.products.linear import Linear, Linears
from twostroke.models.adapters.peft import Adapter
from twostroke.models.adapters.shapes import ProjectionShapes

STACKED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Projections with outputs side by side in one product of the model, in this order."""


@dataclass(frozen=True, slots=True, eq=False)
class AddedProduct:
    first: int
    """Column of the model's product at which this one is added."""
    shrink: Linear
    expand: Linear
    """The product by B, with the scale."""


class TorchAdapter:
    """The products of one adapter."""

    def __init__(
        self,
        adapter: Adapter,
        shapes: ProjectionShapes,
        linears: Linears,
        *,
        dtype: torch.dtype,
        row_factors: Mapping[tuple[int, str], torch.Tensor] | None = None,
    ) -> None:
        """`row_factors` are the factors that rows of the model's projections were multiplied by.

        Raises ConfigError where the adapter does not fit the model.
        """
        adapter.check_fits(shapes)
        self._products: dict[tuple[int, str], list[AddedProduct]] = {}
        for stack, names in STACKED.items():
            first = 0
            for name in names:
                for layer in range(shapes.layers):
                    part = adapter.parts.get((layer, name))
                    if part is None:
                        continue
                    b = torch.from_numpy(part.b) * adapter.scale
                    factors = (row_factors or {}).get((layer, name))
                    if factors is not None:
                        b = b * factors[:, None].to(b.dtype)
                    shrink = linears.linear(torch.from_numpy(part.a).to(dtype))
                    added = AddedProduct(first, shrink, linears.linear(b.to(dtype)))
                    self._products.setdefault((layer, stack), []).append(added)
                first += shapes.sizes[name][1]

    def add(self, layer: int, stack: str, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds this adapter's product of `rows` of x [all rows, inputs] to the same rows of y [all rows, outputs]."""
        products = self._products.get((layer, stack))
        if products is None:
            return
        own = x[rows]
        for product in products:
            added = product.expand(product.shrink(own))
            y[rows, product.first : product.first + added.shape[1]] += added

    def changes(self, layer: int, stack: str) -> bool:
        return (layer, stack) in self._products


class StepAdapters:
    """The `AddedProducts` of one step: the adapters of its rows."""

    def __init__(self, of_row: Sequence[TorchAdapter | None]) -> None:
        self._of_row = list(of_row)
        rows: dict[TorchAdapter, list[int]] = {}
        for row, adapter in enumerate(of_row):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        self._rows = {adapter: torch.tensor(own) for adapter, own in rows.items()}

    def pruned(self, rows: torch.Tensor) -> StepAdapters:
        """Returns the adapters of only these rows."""
        return StepAdapters([self._of_row[row] for row in rows.tolist()])

    def add(self, layer: int, stack: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds what the rows' adapters add to y, a product of x. Returns y itself."""
        for adapter, rows in self._rows.items():
            adapter.add(layer, stack, x, y, rows)
        return y
