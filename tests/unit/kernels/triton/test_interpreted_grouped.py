"""Products of experts in the interpreter, against each expert's own product in torch.

A row's bits are compared by `make gpu`: the interpreter multiplies as numpy does, where they depend on their place.
"""

from __future__ import annotations

import pytest
import torch

from twostroke.kernels.products.grouped import TILE_ROWS, RoutedPairs, TorchGrouped, most_tiles
from twostroke.kernels.triton.grouped import TritonGrouped

SLACK = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def chosen_of(rows: int, experts: int, per_token: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(rows, experts, generator=draw).argsort(dim=1)[:, :per_token].sort(dim=1).values


@pytest.mark.parametrize(("rows", "experts", "per_token"), [(1, 4, 2), (7, 3, 1), (90, 2, 2), (40, 9, 3)])
def test_tiles_hold_every_pair_once_and_each_is_of_one_expert(rows: int, experts: int, per_token: int) -> None:
    chosen = chosen_of(rows, experts, per_token)
    pairs = RoutedPairs.of(chosen, experts)
    assert pairs.counts.tolist() == torch.bincount(chosen.flatten(), minlength=experts).tolist()
    assert len(pairs.tile_starts) == most_tiles(rows * per_token, experts)
    covered = []
    for start, end, expert in zip(pairs.tile_starts, pairs.tile_ends, pairs.tile_experts, strict=True):
        places = pairs.order[int(start) : int(end)].long()
        assert len(places) <= TILE_ROWS
        assert (chosen.flatten()[places] == expert).all()
        assert places.tolist() == sorted(places.tolist())
        covered += places.tolist()
    assert covered == pairs.order.tolist()
    assert sorted(covered) == list(range(rows * per_token))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", SLACK)
def test_an_mlp_of_experts_equals_the_products_of_each(dtype: torch.dtype, has_bias: bool) -> None:
    rows, experts, per_token, hidden, width = 75, 4, 2, 40, 72
    torch.manual_seed(1)
    x = torch.randn(rows, hidden).to(dtype)
    first, second = (torch.randn(experts, *shape).to(dtype) / 6 for shape in ((width, hidden), (hidden, width)))
    biases = [torch.randn(experts, n).to(dtype) if has_bias else None for n in (width, hidden)]
    chosen = chosen_of(rows, experts, per_token)
    weights = torch.rand(rows, per_token)
    pairs = RoutedPairs.of(chosen, experts)
    results = []
    for products in (TritonGrouped(), TorchGrouped()):
        inner = products.gathered(x, first, biases[0], pairs)
        answers = products.scattered(inner, second, biases[1], pairs)
        results.append((inner, answers, products.combined(answers, weights)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=SLACK[dtype], atol=SLACK[dtype] * 3)


@pytest.mark.parametrize("held", [range(2), range(2, 5)])
def test_pairs_with_experts_that_are_held_elsewhere_come_last_and_are_in_no_tile(held: range) -> None:
    rows, experts, per_token = 75, 5, 2
    chosen = chosen_of(rows, experts, per_token)
    local = torch.where((chosen >= held.start) & (chosen < held.stop), chosen - held.start, len(held))
    pairs = RoutedPairs.of(local, len(held))
    count = int((local < len(held)).sum())
    covered = [
        place for start, end in zip(pairs.tile_starts, pairs.tile_ends, strict=True) for place in range(start, end)
    ]
    assert covered == list(range(count))
    x, weight = torch.randn(rows, 40), torch.randn(experts, 72, 40)
    own = weight[held.start : held.stop].contiguous()
    found = TritonGrouped().gathered(x, own, None, pairs)[:count]
    flat = chosen.flatten()[pairs.order[:count].long()]
    right = torch.stack([weight[e] @ x[p // per_token] for e, p in zip(flat, pairs.order[:count], strict=True)])
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
