"""A model's config.json as transformers reads it. What we would compute wrongly is refused by its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twostroke.base.errors import UnsupportedModel
from twostroke.models.end_tokens import end_tokens

ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Our names of activations, by transformers' names."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishedConfig:
    directory: Path
    config: Any
    """The config as an object of transformers."""
    raw: dict[str, Any]
    """The content of config.json."""
    max_model_len: int | None
    """Most tokens of a sequence that will be served; None: what the model was made for."""
    supported: str
    """The sentence on what is served at all, for refusals."""

    def refusal(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.directory}: {what} is not supported. {self.supported}", field="model")

    def require(self, key: str, *computed: object) -> None:
        """Raises UnsupportedModel where the config has another value of `key` than those that are computed."""
        value = getattr(self.config, key, computed[0])
        if value not in computed:
            raise self.refusal(f"{key} {value!r}")

    def activation(self, key: str = "hidden_act") -> str:
        """Returns our name of the activation. Raises UnsupportedModel for one that we do not have."""
        name = getattr(self.config, key)
        if name not in ACTIVATIONS:
            raise self.refusal(f"activation {name!r}")
        return ACTIVATIONS[name]

    def head_dim(self) -> int:
        config = self.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def layer_types(self) -> Sequence[str]:
        """Returns the kind of each layer's attention. Raises UnsupportedModel for other kinds than full and sliding."""
        kinds = list(self.config.layer_types)
        for kind in kinds:
            if kind not in {"full_attention", "sliding_attention"}:
                raise self.refusal(f"layer_types {kind!r}")
        return kinds

    def eos_token_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end an answer. Raises ValueError for what is not a token."""
        ids, vocab_size = self.config.eos_token_id, int(self.config.vocab_size)
        if self.raw.keys() & {"eos_token_id", "text_config"}:
            return end_tokens(self.directory, ids, vocab_size)
        return end_tokens(self.directory, None, vocab_size, usual_ids=ids)
