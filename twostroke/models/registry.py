"""From a model directory to its spec: transformers reads the config, we refuse by name what we do not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twostroke.errors import ConfigError, UnsupportedModel
from twostroke.models.spec import SUPPORTED_ARCHITECTURES, ModelSpec, RopeSpec

SUPPORTED_ROPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the length of the sequence at hand."""

_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_spec(directory: Path, max_model_len: int | None = None) -> ModelSpec:
    """The spec of the model in `directory`.

    `max_model_len` is what will be served: a sliding window at least that long is never in use and no obstacle.
    Raises UnsupportedModel for what we would compute wrongly, ConfigError for a config that cannot be read.
    """
    try:
        config: Any = AutoConfig.from_pretrained(directory)
    except KeyError as error:
        raise _unsupported(directory, f"model type {error}") from error
    except (OSError, ValueError, StrictDataclassError) as error:
        if "does not recognize this architecture" in str(error):
            raise _unsupported(directory, f"model type {_raw_config(directory).get('model_type')!r}") from error
        raise ConfigError(
            f"{directory / 'config.json'} cannot be read: {' '.join(str(error).split())}", field="model"
        ) from error
    architecture = _architecture(directory, config)
    _refuse_unknown_features(directory, config)
    rope, max_position_embeddings = _rope(directory, config)
    _refuse_sliding_window(directory, config, min(max_model_len or max_position_embeddings, max_position_embeddings))
    has_attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=max_position_embeddings,
        eos_token_ids=_eos_token_ids(directory, config),
        rope=rope,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM" or has_attention_bias,
        attention_output_bias=architecture != "Qwen2ForCausalLM" and has_attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _unsupported(directory: Path, what: str) -> UnsupportedModel:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    return UnsupportedModel(
        f"{directory}: {what} is not supported. Supported: {supported} with full attention, silu, unquantised weights, "
        f"rope {', '.join(SUPPORTED_ROPES)}.",
        field="model",
    )


def _raw_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def _architecture(directory: Path, config: Any) -> str:
    named = config.architectures or []
    architecture: str = named[0] if named else _ARCHITECTURE_OF_TYPE.get(config.model_type, config.model_type)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(directory, f"architecture {architecture}")
    return architecture


def _refuse_unknown_features(directory: Path, config: Any) -> None:
    if config.hidden_act != "silu":
        raise _unsupported(directory, f"activation {config.hidden_act!r}")
    quantization = _raw_config(directory).get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "of unknown method")
        raise _unsupported(directory, f"quantised weights ({method})")
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        raise _unsupported(directory, "a mixture of experts")


def _refuse_sliding_window(directory: Path, config: Any, served_tokens: int) -> None:
    window = getattr(config, "sliding_window", None)
    if window is None or window >= served_tokens:
        return
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return
    raise _unsupported(
        directory,
        f"sliding window attention (a window of {window} tokens, served length {served_tokens}; "
        f"--max-model-len {window} or less never reaches it)",
    )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(directory: Path, config: Any) -> tuple[RopeSpec, int]:
    """Frequencies as transformers computes them, and the length that they reach."""
    parameters: dict[str, Any] = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPES:
        raise _unsupported(directory, f"rope type {kind!r}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(directory, "rotating only part of a head (partial_rotary_factor)")
    reach = config.max_position_embeddings
    frequencies, scaling = (
        _plain_rope(config) if kind == "default" else ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    )
    if kind == "yarn":
        reach = max(reach, int(parameters.get("original_max_position_embeddings", reach) * parameters["factor"]))
    if kind == "linear":
        reach = int(reach * parameters["factor"])
    rope = RopeSpec(kind=kind, inverse_frequencies=tuple(frequencies.tolist()), attention_scaling=float(scaling))
    return rope, reach


def _plain_rope(config: Any) -> tuple[torch.Tensor, float]:
    dim = _head_dim(config)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


def _eos_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """generation_config.json knows of chat turns' ends that config.json often omits."""
    ids = config.eos_token_id
    generation = directory / "generation_config.json"
    if generation.exists():
        ids = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", ids)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
