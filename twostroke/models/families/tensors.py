"""The tensors of a family's files under the names that the rest of the program knows, which are Llama's and these:

model.position_embeddings                          the table of learned positions
model.layers.N.attention_output_norm, mlp_output_norm   norms before the sum with the residual stream
mlp.up_proj, where the MLP is not gated            its first product
mlp.gate, mlp.shared_expert_gate                    the router of a layer with experts, and the gate of a shared one
mlp.experts.E.gate_proj .., mlp.shared_expert.gate_proj ..   their products

Modules that Llama has not, such as those of latents, are called as in their files.

Rows that a file has fused are taken apart. Some models rotate only a part of a head, or have rotated pairs side by
side. There the rows of q and k are reordered: the two numbers of a pair then lie half of the rotated part apart, as in
heads that are rotated as a whole. That changes no score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from twostroke.kernels.products.stored import Matrix
from twostroke.models.families.published import PublishedConfig
from twostroke.models.spec import LatentSpec, ModelSpec
from twostroke.models.weights.tensors import WeightSource

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_HEADS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")
"""Modules with channels of heads as rows, which rope rotates."""
_LATENT_QUERIES: Final = ("self_attn.q_proj", "self_attn.q_b_proj")
_LATENT_KEY: Final = "self_attn.kv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The rows of one projection in a file's tensor. The tensor consists of equal groups of rows, and each group of
    parts, one for each projection."""

    groups: int
    parts: tuple[int, ...]
    """Number of rows of each part of a group."""
    index: int
    """The projection's part in each group."""

    @property
    def rows(self) -> int:
        """Returns the number of rows of the file's tensor."""
        return self.groups * sum(self.parts)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the projection's rows, [groups * part, ...]."""
        grouped = tensor.view(self.groups, sum(self.parts), *tensor.shape[1:])
        return grouped.narrow(1, sum(self.parts[: self.index]), self.parts[self.index]).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models with the same architecture."""

    architecture: str
    """Name of the architecture in config.json."""
    model_type: str
    read: Callable[[PublishedConfig], ModelSpec]
    """Turns a published config into the spec. Raises UnsupportedModel, naming the key, for what is not computed."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in the files, by ours, of modules that have another name: whole names, or those after model.layers.N.

    A * stands for the number of an expert.
    """
    layers: str = "model.layers"
    fused: Callable[[ModelSpec], Mapping[str, FusedRows]] = field(default=lambda _: {})
    """Projections, by our name after model.layers.N, that share a tensor of the file."""
    is_transposed: bool = False
    """Whether the files store the layers' matrices as [inputs, outputs]."""

    def name_of(self, module: str) -> str:
        """Returns the file's name of a module."""
        found = _LAYER.fullmatch(module)
        if found is None:
            return self.names.get(module, module)
        return f"{self.layers}.{found[1]}.{self._part(found[2])}"

    def _part(self, part: str) -> str:
        found = _EXPERT.fullmatch(part)
        if found is None:
            return self.names.get(part, part)
        of_all = f"mlp.experts.*.{found[2]}"
        return self.names.get(of_all, of_all).replace("*", found[1])


def family_source(source: WeightSource, family: Family, spec: ModelSpec) -> WeightSource:
    """Returns the source of the same tensors under our names."""
    return _FamilySource(source, family, spec, family.fused(spec), _row_orders(spec))


def _row_orders(spec: ModelSpec) -> Mapping[str, torch.Tensor]:
    """Returns for each module the new order of a head's channels.

    In it, the two channels of a rotated pair lie half of the rotated part apart. Modules that have this order already
    are left out.
    """
    if spec.latents is not None:
        return _latent_orders(spec.latents)
    pairs, half, dim = spec.ropes[0].rotated_pairs, spec.head_dim // 2, spec.head_dim
    if pairs in {0, half}:
        return {}
    channels = torch.arange(dim)
    low, high, rest = channels[:pairs], channels[pairs : 2 * pairs], channels[2 * pairs :]
    return dict.fromkeys(_HEADS, torch.cat((low, rest[: half - pairs], high, rest[half - pairs :])))


def _latent_orders(latents: LatentSpec) -> Mapping[str, torch.Tensor]:
    """Returns the orders for models with latents, where only the last channels of queries and keys are rotated."""
    if not latents.is_interleaved:
        return {}

    def order(before: int) -> torch.Tensor:
        channels = torch.arange(before + latents.rope_dim)
        return torch.cat((channels[:before], channels[before::2], channels[before + 1 :: 2]))

    return {**dict.fromkeys(_LATENT_QUERIES, order(latents.plain_dim)), _LATENT_KEY: order(latents.latent_dim)}


@dataclass(frozen=True, slots=True, eq=False)
class _FamilySource:
    source: WeightSource
    family: Family
    spec: ModelSpec
    fused: Mapping[str, FusedRows]
    orders: Mapping[str, torch.Tensor]

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises what the source raises."""
        module, _, kind = name.rpartition(".")
        found = _LAYER.fullmatch(module)
        part = found[2] if found else module
        tensor = self._whole(f"{self.family.name_of(module)}.{kind}", shape, self.fused.get(part), found is not None)
        if part.endswith("norm") and self.spec.has_wide_norms:
            tensor = tensor.float() + 1
        order = self.orders.get(part)
        if order is not None and not tensor.is_meta:
            tensor = tensor.view(-1, len(order), *shape[1:])[:, order].view(shape)
        return tensor

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Raises what the source raises. Matrices that lie as [inputs, outputs] are plain numbers."""
        module, _, kind = name.rpartition(".")
        found = _LAYER.fullmatch(module)
        part = found[2] if found else module
        if self.family.is_transposed and found is not None:
            return self.take(name, rows, inputs)
        fused, order = self.fused.get(part), self.orders.get(part)
        stored_rows = rows if fused is None else fused.rows
        matrix = self.source.take_matrix(f"{self.family.name_of(module)}.{kind}", stored_rows, inputs)
        if fused is None and order is None:
            return matrix
        if isinstance(matrix, torch.Tensor):
            return self.take(name, rows, inputs)
        picked = torch.arange(stored_rows)
        if fused is not None:
            picked = fused.of(picked)
        if order is not None:
            picked = picked.view(-1, len(order))[:, order].flatten()
        return matrix.picked(picked)

    def _whole(self, name: str, shape: tuple[int, ...], fused: FusedRows | None, is_in_layer: bool) -> torch.Tensor:
        """Returns a tensor as [outputs, inputs], without the rows of other projections in the same tensor of the
        file."""
        stored = shape if fused is None else (fused.rows, *shape[1:])
        is_transposed = self.family.is_transposed and is_in_layer and len(shape) == 2
        tensor = self.source.take(name, *(reversed(stored) if is_transposed else stored))
        if is_transposed:
            tensor = tensor.t().contiguous()
        return tensor if fused is None else fused.of(tensor)
