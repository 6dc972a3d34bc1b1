"""Rotary positions from the parameters that a config publishes, as transformers computes them."""

from __future__ import annotations

from typing import Any, Final

import torch

from twostroke.models.families.published import PublishedConfig
from twostroke.models.spec import RopeSpec

KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope")
"""Rope types with frequencies that do not depend on the length of the sequence."""


def no_rope(head_dim: int) -> RopeSpec:
    """Returns the rope of models that rotate nothing."""
    return RopeSpec(kind="none", inverse_frequencies=(0.0,) * (head_dim // 2))


def read_rope(published: PublishedConfig, layer_type: str | None = None, *, may_be_partial: bool = False) -> RopeSpec:
    """Returns the rope of all layers, or of the layers of one type where the config distinguishes them.

    Raises UnsupportedModel for a type that is not computed, and for heads that are rotated in part unless
    `may_be_partial`.
    """
    parameters = _parameters(published, layer_type)
    kind = parameters.get("rope_type", "default")
    if kind not in KINDS:
        raise published.refusal(f"rope type {kind!r}")
    factor = parameters.get("partial_rotary_factor", 1.0)
    if factor != 1.0 and not may_be_partial:
        raise published.refusal("rotating only part of a head (partial_rotary_factor)")
    if kind == "default":
        frequencies, scaling = _plain(published.head_dim(), factor, parameters["rope_theta"]), 1.0
    else:
        # Imported here, because a device computes where transformers is not installed.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        which = {} if layer_type is None else {"layer_type": layer_type}
        served = {"seq_len": served_tokens(published)} if kind == "longrope" else {}
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](published.config, torch.device("cpu"), **served, **which)
    rest = published.head_dim() // 2 - len(frequencies)
    return RopeSpec(
        kind=kind,
        inverse_frequencies=(*frequencies.tolist(), *[0.0] * rest),
        attention_scaling=float(scaling),
    )


def reach(published: PublishedConfig) -> int:
    """Returns how many tokens a model of Llama's kind was made for, its rope's scaling included."""
    parameters, most = published.config.rope_parameters, int(published.config.max_position_embeddings)
    kind = parameters.get("rope_type", "default")
    if kind == "yarn":
        return max(most, int(parameters.get("original_max_position_embeddings", most) * parameters["factor"]))
    return int(most * parameters["factor"]) if kind == "linear" else most


def served_tokens(published: PublishedConfig) -> int:
    """Returns the longest sequence that is served. If it exceeds the original length, longrope uses its long factors
    for all sequences."""
    most = int(published.config.max_position_embeddings)
    return min(published.max_model_len or most, most)


def _parameters(published: PublishedConfig, layer_type: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = published.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _plain(head_dim: int, factor: float, theta: float) -> torch.Tensor:
    dim = int(head_dim * factor)
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
