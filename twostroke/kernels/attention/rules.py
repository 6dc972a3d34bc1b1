"""How each layer of a model attends: its scale, its window, the soft cap of its scores, and its rope. No torch here.

Kernels take the rules of the layers of their pool. A rule says nothing of pages: these hold all tokens, and a window
hides those that a row must not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The rule of one layer."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Tokens that a token sees, itself included; None: all up to itself."""
    softcap: float | None = None
    """Scores s, scaled, become softcap * tanh(s / softcap) before they are masked; None: they stay as they are."""
    rope: int = 0
    """Which of the model's ropes rotates queries and keys."""

    def first_visible(self, position: int) -> int:
        """Returns the first position that a token sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


AnyRules = float | Sequence[AttentionRule]
"""A rule for each layer, or the scale of all of them where they see everything up to themselves with the first rope."""


def rule_of(rules: AnyRules, layer: int) -> AttentionRule:
    """Returns the rule of one layer."""
    return AttentionRule(scale=rules) if isinstance(rules, float | int) else rules[layer]


def rules_of(rules: AnyRules, layers: int) -> tuple[AttentionRule, ...]:
    """Returns a rule for each of so many layers."""
    if isinstance(rules, float | int):
        return (AttentionRule(scale=rules),) * layers
    assert len(rules) == layers, f"{len(rules)} rules for {layers} layers"
    return tuple(rules)
