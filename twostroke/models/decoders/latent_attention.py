"""Latent attention in torch's operations: what lies before and behind attention to pages of latents.

Pages hold the latents of tokens, and keys and values are made from those by one product per head. Instead of all keys,
the query of each head is multiplied with the keys' half of that product: it then meets the latents themselves. What it
gathers is a sum of latents, which the values' half turns into one of values.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from twostroke.models.spec import LatentSpec
from twostroke.models.weights.products import Latents


def queries_and_keys(projected: torch.Tensor, weights: Latents, spec: LatentSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q [T, heads, key_dim] and k [T, 1, key_dim], both before rope, of a layer's projected input.

    `projected` [T, ..] has queries or their latent, then the latent of keys and values and the rotated key.
    """
    rows = len(projected)
    queries = projected.shape[1] - spec.key_dim
    q, latent, rotated = torch.split(projected, [queries, spec.latent_dim, spec.rope_dim], dim=1)
    if weights.queries is not None and weights.query_norm is not None:
        q = weights.queries(_norm(q, weights.query_norm, spec))
    plain, turned = torch.split(q.reshape(rows, -1, spec.query_dim), [spec.plain_dim, spec.rope_dim], dim=2)
    absorbed = torch.stack([product(plain[:, head]) for head, product in enumerate(weights.absorb)], dim=1)
    k = torch.cat((_norm(latent, weights.norm, spec), rotated), dim=1)
    return torch.cat((absorbed, turned), dim=2), k[:, None]


def values_of(attended: torch.Tensor, weights: Latents) -> torch.Tensor:
    """Returns values [T, heads * value_dim] of each head's sum of latents [T, heads * latent_dim]."""
    by_head = attended.chunk(len(weights.expand), dim=1)
    return torch.cat([product(latents) for latents, product in zip(by_head, weights.expand, strict=True)], dim=1)


def _norm(x: torch.Tensor, weight: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, spec.norm_epsilon)
