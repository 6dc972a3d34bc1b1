"""A mixture of experts in torch's operations: which experts a row has, and what they make of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twostroke.models.expert_load import ExpertLoad
from twostroke.models.spec import ExpertSpec, ModelSpec
from twostroke.models.weights.products import Experts, Mlp


def chosen_experts(logits: torch.Tensor, spec: ExpertSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row [rows, per_token] and their float32 weights, for float32 logits [rows, experts].

    Of experts with equal logits the lower one is chosen.
    """
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : spec.per_token]
    weights = logits.softmax(dim=-1).gather(1, chosen)
    return chosen, weights / weights.sum(dim=-1, keepdim=True) if spec.is_normalised else weights


def mixture(
    x: torch.Tensor, experts: Experts, shared: Mlp | None, spec: ExpertSpec, tokens: torch.Tensor
) -> torch.Tensor:
    """What the experts make of each row of x [rows, hidden], added up by ascending expert in float32.

    `tokens` [experts] counts the rows of each.
    """
    logits = experts.router(x)
    chosen, weights = chosen_experts(logits[:, : spec.count], spec)
    total = torch.zeros_like(x, dtype=torch.float32)
    counts = torch.bincount(chosen.flatten(), minlength=spec.count)
    tokens += counts
    for expert in counts.nonzero().flatten().tolist():
        rows, places = torch.where(chosen == expert)
        mlp = experts.table[expert]
        total[rows] += weights[rows, places, None] * mlp.down(mlp.inner(x[rows]))
    if shared is not None:
        total += logits[:, spec.count :].sigmoid() * shared.down(shared.inner(x))
    return total.to(x.dtype)


def counters(spec: ModelSpec) -> tuple[ExpertLoad | None, Mapping[int, torch.Tensor]]:
    """Return the load of a model's experts, and by layer the int64 tensors [experts] that count for it."""
    if spec.experts is None or spec.expert_layers == 0:
        return None, {}
    tokens = torch.zeros(spec.expert_layers, spec.experts.count, dtype=torch.int64)
    layers = [layer for layer in range(spec.layers) if spec.experts_of(layer) is not None]
    return ExpertLoad(tokens.numpy()), dict(zip(layers, tokens, strict=True))
