"""The groups of layers whose pages are counted apart: what their attention reads, and the bytes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twostroke.engine.backends.memory_plan import MemoryPlan
from twostroke.kv_cache.form import page_form
from twostroke.models.spec import ModelSpec
from twostroke.page_forms.page_form import PageShape


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose pages are alike."""

    kind: str
    """What their attention reads: all tokens, or those of a window."""
    shape: PageShape
    """The dimensions of one block in all layers of the group."""
    window: int | None = None
    """Tokens that a token sees in layers whose pages lie apart."""

    def page_bytes(self, form: str) -> int:
        """Returns the bytes of one block in all layers of the group."""
        return page_form(form).page_bytes(self.shape)

    def as_json(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "kind": self.kind,
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "window": self.window,
            "latent_dim": shape.latent_dim,
        }


def groups_of(spec: ModelSpec, plan: MemoryPlan) -> tuple[LayerGroup, ...]:
    """Returns the groups of layers whose pages are counted apart."""
    if len(plan.groups) == 1:
        return (LayerGroup(_attention_of(spec), plan.shapes[0]),)
    return tuple(
        LayerGroup(
            "full attention" if group.window is None else f"a window of {group.window} tokens", shape, group.window
        )
        for group, shape in zip(plan.groups, plan.shapes, strict=True)
    )


def _attention_of(spec: ModelSpec) -> str:
    """Says what the layers read. Pages of window layers hold all tokens, as those of others do."""
    if spec.latents is not None:
        return f"latents of {spec.latents.latent_dim} and a rotated key of {spec.latents.rope_dim}"
    windows = sorted({rule.window for rule in spec.rules if rule.window is not None})
    if not windows:
        return "full attention"
    count = sum(rule.window is not None for rule in spec.rules)
    return f"full attention ({count} layers: {' and '.join(map(str, windows))} tokens)"
