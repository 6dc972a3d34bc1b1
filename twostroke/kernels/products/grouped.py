"""Matrix products of experts: rows that are sorted by expert, and the weights of all experts in one tensor.

A row and each of its experts make a pair. The first product of an MLP gathers the rows of pairs by expert. The second
one scatters its outputs back to the order of pairs, so that they are added up row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.nn import functional

TILE_ROWS: Final = 64
"""Pairs of a tile. All tiles have one shape, so a row's bits do not depend on the number of pairs."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedPairs:
    """Pairs of rows and experts in the order of experts. All of it is on the device, and shapes depend only on the
    number of rows, so that a step with it can be recorded.

    Pairs with experts that are held elsewhere come last and are in no tile: nothing is computed for them.
    """

    order: torch.Tensor
    """int32 [pairs]: the pair at each position, as row * per_token + index among the row's experts"""
    tile_starts: torch.Tensor
    """int32 [tiles]: the first position of each tile"""
    tile_ends: torch.Tensor
    """int32 [tiles]: the position after its last one; equal to its start where the tile is unused"""
    tile_experts: torch.Tensor
    """int32 [tiles]"""
    counts: torch.Tensor
    """int64 [experts]: pairs of each expert"""
    per_token: int

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int) -> RoutedPairs:
        """Sorts the pairs of int64 [rows, per_token] experts; those of one expert stay in the order of rows.

        The number `experts` stands for every expert that is held elsewhere.
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]
        ends = counts.cumsum(0)
        tiles_of = (counts + TILE_ROWS - 1) // TILE_ROWS
        tile_ends = tiles_of.cumsum(0)
        tile = torch.arange(most_tiles(len(flat), experts), device=flat.device)
        expert = torch.searchsorted(tile_ends, tile, right=True).clamp_(max=experts - 1)
        # index of a tile among its expert's: tile - tile_ends + tiles_of
        first = ends[expert] - counts[expert] + (tile - tile_ends[expert] + tiles_of[expert]) * TILE_ROWS
        starts = torch.minimum(first, ends[expert])
        return cls(
            order=order.int(),
            tile_starts=starts.int(),
            tile_ends=torch.minimum(starts + TILE_ROWS, ends[expert]).int(),
            tile_experts=expert.int(),
            counts=counts,
            per_token=chosen.shape[1],
        )


def most_tiles(pairs: int, experts: int) -> int:
    """Returns the most tiles for this many pairs: all full ones, and a partial one for each expert."""
    return pairs // TILE_ROWS + min(pairs, experts)


class GroupedProducts(Protocol):
    """Products with weights [experts, outputs, inputs] and biases [experts, outputs] or None; sums are float32.

    Products of pairs with experts that are held elsewhere are undefined.
    """

    def gathered(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs
    ) -> torch.Tensor:
        """Returns products of x [rows, inputs] as [pairs, outputs] in the order of experts."""

    def scattered(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs
    ) -> torch.Tensor:
        """Returns products of x [pairs, inputs], which is in the order of experts, as [pairs, outputs] in the order of
        rows."""

    def combined(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the sums of each row's outputs [pairs, outputs], times float32 [rows, per_token], added in order:
        float32."""


class TorchGrouped:
    """`GroupedProducts` in torch, expert by expert: the host waits for the counts."""

    def gathered(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs
    ) -> torch.Tensor:
        return _by_expert(x[pairs.order.long() // pairs.per_token], weight, bias, pairs)

    def scattered(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs
    ) -> torch.Tensor:
        y = _by_expert(x, weight, bias, pairs)
        return torch.empty_like(y).index_copy_(0, pairs.order.long(), y)

    def combined(self, answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        grouped = answers.view(*weights.shape, -1)
        total = torch.zeros(len(weights), answers.shape[1], device=answers.device)
        for index in range(weights.shape[1]):
            total += weights[:, index, None] * grouped[:, index].float()
        return total


def _by_expert(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: RoutedPairs) -> torch.Tensor:
    counts = pairs.counts.tolist()
    *parts, elsewhere = torch.split(x, [*counts, len(x) - sum(counts)])
    products = [
        functional.linear(part, weight[expert], None if bias is None else bias[expert])
        for expert, part in enumerate(parts)
    ]
    return torch.cat([*products, x.new_full((len(elsewhere), weight.shape[1]), float("nan"))])
