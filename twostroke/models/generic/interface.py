"""Intercepts a layer's queries, keys and values in transformers' modelling code, rotated if need be.

transformers finds attention by a name in its tables of functions. Ours is one function, which calls the object that was
put into the model's modules. Source: transformers' AttentionInterface and AttentionMaskInterface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

PAGED: Final = "twostroke"
"""Our name in transformers' table of attention functions. It is not in the table of masks, so that no mask is made."""
PROBED: Final = "twostroke_probe"
"""Our name in both tables while a model is probed and nothing is computed. Masks show which tokens a layer attends to.
"""
SINKS: Final = "s_aux"
"""The option of attention that adds one score to each head's softmax, [heads]. The value of that score is zero."""
_KEY: Final = "twostroke_attention"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One layer's attention in one forward pass."""

    query: torch.Tensor
    """[1, heads, tokens, head_dim]"""
    key: torch.Tensor
    """[1, kv_heads, tokens, head_dim]"""
    value: torch.Tensor
    """[1, kv_heads, tokens, value_dim]"""
    mask: Any
    """The mask that the table of masks made for this layer; None without one."""
    scale: float
    options: Mapping[str, Any]
    """All other keyword arguments."""


class InterceptedAttention(Protocol):
    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Returns [1, tokens, heads, value_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """Takes the place of a mask while nothing is computed. Code that changes masks by itself fails on it."""

    allows: Any
    """transformers' own mask function, of batch, head, query and key indices."""
    local_size: int | None
    """Tokens in a layer's window, or in its chunks; None where the mask has neither."""


def intercept(model: torch.nn.Module, attention: InterceptedAttention) -> None:
    """Has `attention` compute the attention of all the model's modules."""
    for module in model.modules():
        module.__dict__[_KEY] = attention


def register() -> None:
    """Puts our names into transformers' tables."""
    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBED, _attend)
    AttentionMaskInterface.register(PROBED, _mask)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(query, key, value, attention_mask, scale, options)
    attention: InterceptedAttention = module.__dict__[_KEY]
    return attention(call), None


def _mask(*, mask_function: Any, local_size: int | None = None, **_options: Any) -> SeenTokens:
    return SeenTokens(mask_function, local_size)
