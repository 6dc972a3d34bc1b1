"""The attention rule of each layer: its scale, its window, the soft cap of its scores, and its rope. No torch here.

Kernels take the rules of the layers of their pool. Rules have no influence on pages: these hold all tokens, and a
window only hides those that a row must not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from twostroke.kv_cache.groups.page_group import PageGroup, page_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The rule of one layer."""

    scale: float
    """Factor on the products of queries and keys."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all up to itself."""
    softcap: float | None = None
    """Scores s, scaled, become softcap * tanh(s / softcap) before they are masked; None: they stay as they are."""
    rope: int = 0
    """Index of the model's rope that rotates queries and keys."""

    def first_visible(self, position: int) -> int:
        """Returns the first position that a token attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def sees(self, positions: Any, keys: Any) -> Any:
        """Returns whether tokens at these positions attend to keys at those, for numbers, arrays or tensors of
        positions."""
        seen = keys <= positions
        return seen if self.window is None else seen & (keys > positions - self.window)

    def most_seen(self, context: int, rows: int) -> int:
        """Returns how many tokens of a context its last rows attend to together."""
        return context if self.window is None else min(context, self.window + rows - 1)

    @property
    def sight(self) -> int | None:
        """A value that is equal for layers whose tokens attend to the same tokens."""
        return self.window


SEES_ALL: Final = AttentionRule(scale=1.0)

AnyRules = float | Sequence[AttentionRule]
"""A rule for each layer, or the scale of all layers where they attend to everything up to themselves with the first
rope."""


def page_groups_of(rules: Sequence[AttentionRule]) -> tuple[PageGroup, ...]:
    """Returns the page groups of a model whose layers have these rules, the full group first."""
    return page_groups([rule.window for rule in rules])


def rule_of(rules: AnyRules, layer: int) -> AttentionRule:
    """Returns the rule of one layer."""
    return AttentionRule(scale=rules) if isinstance(rules, float | int) else rules[layer]


def rules_of(rules: AnyRules, layers: int) -> tuple[AttentionRule, ...]:
    """Returns a rule for each of this many layers."""
    if isinstance(rules, float | int):
        return (AttentionRule(scale=rules),) * layers
    assert len(rules) == layers, f"{len(rules)} rules for {layers} layers"
    return tuple(rules)
