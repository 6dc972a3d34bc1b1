"""The weights of a model in the format of the native kernels, from a file that the host's workers share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import torch

from twostroke.base.cache_key import cache_key, content_digest
from twostroke.kernels.cpu.linear import NativeLinears
from twostroke.kernels.cpu.weights.arena import Arena, MappedArena, PrivateArena, WritingArena
from twostroke.kernels.products.stored import Matrix
from twostroke.models.catalog.places import cache_dir
from twostroke.models.families.table import named
from twostroke.models.file_versions import FileVersions, unchanged
from twostroke.models.page_forms.balanced_keys import balanced
from twostroke.models.shares.shared_out import shared_out
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.digest import weights_digest
from twostroke.models.weights.packed_file import SUFFIX, mapped
from twostroke.models.weights.products import (
    Experts,
    Latents,
    LayerWeights,
    ModelWeights,
    take_products,
)
from twostroke.models.weights.stored.formats import OpenWeights, open_weights
from twostroke.models.weights.tensors import WeightSource, take_positions

CONFIG: Final = "config.json"


@dataclass(frozen=True, slots=True)
class MatrixShapes:
    """A source of whole vectors, but only of the shapes of matrices: a mapped file has their numbers already."""

    files: WeightSource

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises what the files raise."""
        tensor = self.files.take(name, *shape)
        return tensor if len(shape) == 1 else tensor.to("meta")

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Raises what the files raise."""
        matrix = self.files.take_matrix(name, rows, inputs)
        return matrix.to("meta") if isinstance(matrix, torch.Tensor) else matrix


@dataclass(frozen=True, slots=True)
class PackedModel:
    """One model, and one way to pack its weights."""

    directory: Path
    spec: ModelSpec
    dtype: torch.dtype
    is_int8: bool
    make_linears: Callable[[Arena], NativeLinears]

    def load(self, *, with_head: bool) -> ModelWeights:
        """Loads the weights, from the mapped file if possible.

        Raises ConfigError naming a tensor that is missing or has another shape than in the config. Raises it, too,
        where files were changed meanwhile: the packed file and what is read in addition must be of one version, which
        the packed file's name stands for.
        """
        with unchanged(self.directory) as versions:
            return self._load_version(versions, with_head=with_head)

    def _load_version(self, versions: FileVersions, *, with_head: bool) -> ModelWeights:
        region = mapped(self._path(versions), functools.partial(self._write, versions))
        if region is None:
            return self._load(PrivateArena(), with_head=with_head)
        # To quantise only shapes, torch would load its compiler, which takes longer than the weights.
        with self._open() as files:
            source: WeightSource = files if self.is_int8 else MatrixShapes(files)
            whole = self.spec.whole
            matched = balanced(named(source, whole), whole, whole=named(files, whole))
            return self._take(shared_out(matched, self.spec), MappedArena(region), with_head=with_head)

    def _write(self, versions: FileVersions, file: BinaryIO) -> None:
        """Writes all that any worker needs. What a worker without a head needs comes first.

        Raises ConfigError where the content may be of other files than `versions`. It never gets their name then.
        """
        arena = WritingArena(file)
        self._load(arena, with_head=True)
        arena.finish()
        versions.check_unchanged()

    def _load(self, arena: Arena, *, with_head: bool) -> ModelWeights:
        with self._open() as files:
            whole = self.spec.whole
            source = shared_out(balanced(named(files, whole), whole), self.spec)
            return self._take(source, arena, with_head=with_head)

    def _open(self) -> OpenWeights:
        return open_weights(self.directory, self.dtype, keeps_codes=True)

    def _take(self, source: WeightSource, arena: Arena, *, with_head: bool) -> ModelWeights:
        """Takes the weights. Nothing that is returned lies in the model's own files, so that they do not
        stay mapped.
        """
        spec = self.spec
        table = source.take_matrix("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        plain = arena.copy(table) if isinstance(table, torch.Tensor) else None
        positions = take_positions(source, spec)
        if positions is not None:
            positions = arena.copy(positions)
        weights = take_products(source, spec, with_head=with_head, linears=self.make_linears(arena), may_expand=True)
        embedding = weights.embedding if plain is None else plain
        layers = tuple(_detached(layer) for layer in weights.layers)
        norm = weights.norm.detached()
        return replace(weights, embedding=embedding, layers=layers, norm=norm, positions=positions)

    def _path(self, versions: FileVersions) -> Path:
        key = cache_key(
            "packed weights",
            weights=weights_digest(versions),
            config=content_digest([(CONFIG, self.directory / CONFIG)]),  # it determines how weights are quantised
            spec=self.spec,
            dtype=self.dtype,
            is_int8=self.is_int8,
        )
        return packed_folder() / f"{key}{SUFFIX}"


def packed_folder() -> Path:
    """Returns the folder of all files of packed weights."""
    return cache_dir() / "packed"


def _detached(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        attention_norm=layer.attention_norm.detached(),
        q_norm=None if layer.q_norm is None else layer.q_norm.clone(),
        k_norm=None if layer.k_norm is None else layer.k_norm.clone(),
        mlp_norm=layer.mlp_norm.detached(),
        attention_output_norm=None if layer.attention_output_norm is None else layer.attention_output_norm.detached(),
        mlp_output_norm=None if layer.mlp_output_norm is None else layer.mlp_output_norm.detached(),
        sinks=None if layer.sinks is None else layer.sinks.clone(),
        latents=None if layer.latents is None else _detached_latents(layer.latents),
        experts=None if layer.experts is None else _detached_experts(layer.experts),
    )


def _detached_latents(latents: Latents) -> Latents:
    query_norm = None if latents.query_norm is None else latents.query_norm.clone()
    return replace(latents, norm=latents.norm.clone(), query_norm=query_norm)


def _detached_experts(experts: Experts) -> Experts:
    return replace(experts, correction=None if experts.correction is None else experts.correction.clone())
