"""Refuses models that transformers' code cannot serve over pages. It reads only the config, and gives the reason in one
line."""

from __future__ import annotations

from typing import Any, Final

from transformers import AutoModelForCausalLM

from twostroke.base.errors import UnsupportedModel
from twostroke.models.families.published import PublishedConfig

LENGTH_ROPES: Final = ("dynamic", "longrope")
"""Rope types with frequencies that transformers changes with the longest sequence of a step. With them, a page would
depend on other sequences."""
ATTENTION_KINDS: Final = {"full_attention", "sliding_attention"}
MOST_OF_ERROR: Final = 200
"""Most characters of an error from modelling code in a refusal."""


def refuse_by_config(published: PublishedConfig) -> None:
    """Raises UnsupportedModel, one line with the reason, for a model whose pages would be wrong or that has none."""
    config, named = published.config, (published.config.architectures or [published.config.model_type])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise published.refusal(f"{named}, an encoder-decoder, whose decoder reads what is not in pages,")
    if _has_other_inputs(config):
        raise published.refusal(f"{named}, a wrapper of a text model with other inputs beside it,")
    causal = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if causal is None or (config.architectures and causal.__name__ != named):
        raise published.refusal(f"{named}, which is not a causal language model of transformers,")
    if causal._is_stateful:
        raise published.refusal(f"{named}, which keeps a state instead of pages (linear attention, state space),")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ATTENTION_KINDS:
            raise published.refusal(f"layer_types {kind!r}, which keeps no pages of keys and values,")
    for parameters in _ropes(config):
        kind = parameters.get("rope_type", "default")
        if kind in LENGTH_ROPES:
            raise published.refusal(f"rope type {kind!r}, which changes with the longest sequence of a step,")
    if published.raw.get("quantization_config") is not None:
        raise published.refusal(f"{named} with quantised weights (quantization_config)")


def cannot_run(published: PublishedConfig, error: Exception) -> UnsupportedModel:
    """Returns the refusal of a model whose code fails with paged attention in the place of its own."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_OF_ERROR]
    named = (published.config.architectures or [published.config.model_type])[0]
    return published.refusal(f"{named}, whose code does not run with attention over pages ({reason}),")


def _has_other_inputs(config: Any) -> bool:
    """Returns whether the config wraps a text model and models of other inputs."""
    return bool(getattr(type(config), "sub_configs", None)) and "text_config" in type(config).sub_configs


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the parameters of each rope: one for all layers, or one for each kind of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]
