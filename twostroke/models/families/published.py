"""A model's config.json as transformers reads it, and refusals of what we would compute wrongly, by its key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twostroke.errors import UnsupportedModel

ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Our names of activations by transformers'."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishedConfig:
    directory: Path
    config: Any
    """The config as an object of transformers."""
    raw: dict[str, Any]
    """What config.json says."""
    max_model_len: int | None
    """The longest sequence that will be served; None: what the model was made for."""
    supported: str
    """What is served at all, for refusals."""

    def refusal(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.directory}: {what} is not supported. {self.supported}", field="model")

    def require(self, key: str, *computed: object) -> None:
        """Raises UnsupportedModel where the config asks for another value of `key` than those that are computed."""
        value = getattr(self.config, key, computed[0])
        if value not in computed:
            raise self.refusal(f"{key} {value!r}")

    def activation(self, key: str = "hidden_act") -> str:
        """Return our name of the activation. Raises UnsupportedModel for one that we do not have."""
        name = getattr(self.config, key)
        if name not in ACTIVATIONS:
            raise self.refusal(f"activation {name!r}")
        return ACTIVATIONS[name]

    def head_dim(self) -> int:
        config = self.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def layer_types(self) -> Sequence[str]:
        """Return the kind of each layer's attention. Raises UnsupportedModel for other kinds than full and sliding."""
        kinds = list(self.config.layer_types)
        for kind in kinds:
            if kind not in {"full_attention", "sliding_attention"}:
                raise self.refusal(f"layer_types {kind!r}")
        return kinds

    def eos_token_ids(self) -> tuple[int, ...]:
        """generation_config.json knows of chat turns' ends that config.json often omits.

        Raises ValueError for what is no token.
        """
        ids = self.config.eos_token_id
        generation = self.directory / "generation_config.json"
        if generation.exists():
            ids = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", ids)
        if ids is None:
            return ()
        every = (ids,) if isinstance(ids, int) else tuple(ids)
        if not all(isinstance(each, int) for each in every):
            raise ValueError(f"eos_token_id is {ids!r}")
        return every
