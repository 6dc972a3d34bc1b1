"""Makes the spec of a model directory: transformers reads the config, and we refuse by name what we do not compute."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig

from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.config.model import AUTO, TRANSFORMERS
from twostroke.kernels.activation import ACTIVATIONS
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import KINDS
from twostroke.models.families.table import FAMILIES
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.schemes import scheme_of

MOST: Final = 1 << 24
"""The largest dimension: tens of times those of the largest models, and its vectors still fit into memory."""
MOST_LAYERS: Final = 1 << 12
"""The most layers. Lists of layers are made before any tensor is looked for."""
COUNTS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, MOST_LAYERS)),
    **dict.fromkeys(
        (
            "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim",
            "intermediate_size", "n_inner", "moe_intermediate_size", "vocab_size", "kv_lora_rank", "q_lora_rank",
            "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        ),
        (1, MOST),
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1 << 31)),
    **dict.fromkeys(
        (
            "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
            "n_group", "topk_group", "first_k_dense_replace", "shared_expert_intermediate_size",
        ),
        (0, MOST),
    ),
}  # fmt: skip
"""The least and the greatest value of whole numbers, by key. Families check further those that may be 0."""
POSITIVE: Final = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "routed_scaling_factor", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "swiglu_alpha",
)  # fmt: skip
"""Keys of numbers that must be above 0 and finite."""

CONFUSED: Final = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, MemoryError)
"""Exceptions that transformers' code and ours raise where a config has senseless values."""


def read_spec(directory: Path, max_model_len: int | None = None, implementation: str = AUTO) -> ModelSpec:
    """Returns the spec of the model in `directory`.

    `max_model_len` is the longest sequence that will be served; `implementation` is the value of --model-impl. Raises
    UnsupportedModel for what we would compute wrongly, and ConfigError for a config that cannot be read.
    """
    try:
        raw = _raw_config(directory)
        check_numbers(raw, directory / "config.json")
        if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
            raise _unsupported(directory, "code that comes with a model (auto_map), which is never run,")
        config: Any = AutoConfig.from_pretrained(directory)
    except KeyError as error:
        raise _unsupported(directory, f"model type {error}") from error
    except (OSError, StrictDataclassError, *CONFUSED) as error:
        if "does not recognize this architecture" in str(error):
            raise _unsupported(directory, f"model type {_raw_config(directory).get('model_type')!r}") from error
        raise _unreadable(directory, error) from error
    published = PublishedConfig(directory, config, raw, max_model_len, _supported())
    try:
        return _spec_of(published, implementation)
    except CONFUSED as error:
        raise _unreadable(directory, error) from error


def _spec_of(published: PublishedConfig, implementation: str) -> ModelSpec:
    if implementation == TRANSFORMERS or (implementation == AUTO and _architecture(published) not in FAMILIES):
        from twostroke.models.generic.probe import read_generic  # builds models with torch, which families need not

        return read_generic(published)
    family = _family(published)
    _refuse_unknown_features(published)
    spec = family.read(published)
    for key in ("num_experts", "num_local_experts"):
        if spec.experts is None and not spec.dense_layers and getattr(published.config, key, None):
            raise published.refusal(f"a mixture of experts ({key})")
    return spec


def _unreadable(directory: Path, error: BaseException) -> ConfigError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"{directory / 'config.json'} cannot be read: {reason}", field="model")


def _supported() -> str:
    return (
        f"Supported: {', '.join(FAMILIES)} with full or sliding attention, {', '.join(ACTIVATIONS)}, "
        f"rope {', '.join(KINDS)}; and other causal language models whose code in transformers calls its "
        "attention interface once per layer."
    )


def _unsupported(directory: Path, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{directory}: {what} is not supported. {_supported()}", field="model")


def _raw_config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise TypeError("it is not an object")
    return config


def _architecture(published: PublishedConfig) -> str:
    named, kind = published.config.architectures or [], published.config.model_type
    usual = next((family.architecture for family in FAMILIES.values() if family.model_type == kind), kind)
    return named[0] if named else usual


def _family(published: PublishedConfig) -> Family:
    architecture = _architecture(published)
    if architecture not in FAMILIES:
        raise published.refusal(f"architecture {architecture}")
    return FAMILIES[architecture]


def _refuse_unknown_features(published: PublishedConfig) -> None:
    quantization = published.raw.get("quantization_config")
    if quantization is not None:
        scheme_of(quantization, str(published.directory / "config.json"))


def check_numbers(raw: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError, naming the key, for a number of config.json that no model can have.

    Keys that are missing or null are left to the family.
    """
    for key, (least, most) in COUNTS.items():
        value = raw.get(key)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise ConfigError(
                f"{path}: {key} must be a whole number from {least} to {most}, got {value!r:.60}", field="model"
            )
    for key in POSITIVE:
        value = raw.get(key)
        if value is not None and not (type(value) in {int, float} and 0 < value < math.inf):
            raise ConfigError(f"{path}: {key} must be a finite number above 0, got {value!r:.60}", field="model")
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})",
            field="model",
        )
