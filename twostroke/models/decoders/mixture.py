"""A mixture of experts in torch's operations: which experts each row is routed to, and the sum of their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from twostroke.models.expert_load import ExpertLoad
from twostroke.models.spec import ExpertSpec, ModelSpec

if TYPE_CHECKING:  # devices choose experts where safetensors is not installed
    from twostroke.models.weights.products import Experts, Mlp

LEAST_SUM: Final = 1e-20
"""Added to the sum of sigmoids before weights are divided by it, as in transformers: all of them may be zero."""


def chosen_experts(
    logits: torch.Tensor, spec: ExpertSpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the experts of each row [rows, per_token] and their float32 weights, for float32 logits [rows, experts].

    `correction` float32 [experts] is added to sigmoids when experts are chosen. Of equal experts, and of equal groups,
    the lower one is chosen.
    """
    scores_for_choice = logits if correction is None else logits.sigmoid() + correction
    chosen = _highest(_in_best_groups(scores_for_choice, spec), spec.per_token)
    scores = logits.sigmoid() if spec.is_sigmoid else logits.softmax(dim=-1)
    weights = scores.gather(1, chosen)
    if spec.is_normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + (LEAST_SUM if spec.is_sigmoid else 0))
    return chosen, weights * spec.scaling


def _in_best_groups(scores_for_choice: torch.Tensor, spec: ExpertSpec) -> torch.Tensor:
    """Returns the scores, with -infinity for experts outside the groups that a row chooses."""
    if spec.groups_per_token == spec.groups:
        return scores_for_choice
    grouped = scores_for_choice.view(len(scores_for_choice), spec.groups, -1)
    best = grouped.sort(dim=-1, descending=True).values[..., : 2 if spec.is_sigmoid else 1].sum(dim=-1)
    is_hidden = torch.ones_like(best, dtype=torch.bool)
    is_hidden.scatter_(1, _highest(best, spec.groups_per_token), value=False)
    return grouped.masked_fill(is_hidden[..., None], float("-inf")).flatten(1)


def _highest(scores_for_choice: torch.Tensor, count: int) -> torch.Tensor:
    return scores_for_choice.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def mixture(
    x: torch.Tensor, experts: Experts, shared: Mlp | None, spec: ExpertSpec, tokens: torch.Tensor
) -> torch.Tensor:
    """Returns the sum of the outputs of the experts held here for each row of x [rows, hidden], added by ascending
    expert in float32.

    Adds the number of rows of each expert to `tokens` [experts].
    """
    logits = experts.router(x)
    chosen, weights = chosen_experts(logits[:, : spec.count], spec, experts.correction)
    total = torch.zeros_like(x, dtype=torch.float32)
    counts = torch.bincount(chosen.flatten(), minlength=spec.count)
    tokens += counts
    held = counts[experts.first : experts.first + len(experts.table)]
    for index in held.nonzero().flatten().tolist():
        rows, places = torch.where(chosen == experts.first + index)
        mlp = experts.table[index]
        total[rows] += weights[rows, places, None] * mlp.down(mlp.inner(x[rows]))
    if shared is not None:
        answers = shared.down(shared.inner(x))
        total += logits[:, spec.count :].sigmoid() * answers if spec.has_shared_gate else answers
    return total.to(x.dtype)


def counters(spec: ModelSpec) -> tuple[ExpertLoad | None, Mapping[int, torch.Tensor]]:
    """Returns the load of a model's experts, and for each layer the int64 tensor [experts] that counts for it."""
    if spec.experts is None or spec.expert_layers == 0:
        return None, {}
    tokens = torch.zeros(spec.expert_layers, spec.experts.count, dtype=torch.int64)
    layers = [layer for layer in range(spec.layers) if spec.experts_of(layer) is not None]
    return ExpertLoad(tokens.numpy()), dict(zip(layers, tokens, strict=True))
