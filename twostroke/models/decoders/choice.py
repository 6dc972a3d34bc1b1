"""Chooses the decoder that serves a pool, once, when the model is loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.base.errors import ConfigError
from twostroke.kernels.attention.interface import AttentionBackend
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import SERVED, NativeLinears
from twostroke.kernels.products.linear import Linears, TorchLinears
from twostroke.kernels.products.steady import SteadyLinears
from twostroke.kernels.products.stored import Matrix
from twostroke.models.decoders.collective import Collective
from twostroke.models.decoders.native_transformer import NativeTransformer
from twostroke.models.decoders.transformer import Model, Transformer
from twostroke.models.families.table import named
from twostroke.models.page_forms.balanced_keys import balanced, key_centers
from twostroke.models.shares.shared_out import shared_out
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.packed_weights import PackedModel
from twostroke.models.weights.products import ModelWeights, take_products
from twostroke.models.weights.stored.formats import open_weights
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.models.weights.tensors import WeightSource


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded."""

    dtype: torch.dtype
    is_int8: bool = False
    """Whether plain weights are rounded to int8."""
    with_head: bool = True
    is_deterministic: bool = False


def load_model(
    directory: Path,
    spec: ModelSpec,
    backend: AttentionBackend,
    kernels: Kernels | None,
    options: LoadOptions,
    collective: Collective | None = None,
) -> Model:
    """Loads the model: one native call per step where `kernels` can serve it, else torch operations.

    `collective` connects the processes that compute the rest of the model, where `spec` is a share of it. Raises
    ConfigError in three cases: there is no kernel for int8 weights that are configured, the weights cannot be divided
    among the processes, or torch cannot keep what `is_deterministic` promises.
    """
    dtype, is_int8, with_head = options.dtype, options.is_int8, options.with_head
    if is_int8 and layouts_in(directory) is not None:
        raise ConfigError(
            "--weights int8 rounds weights that are plain numbers, but those of this model are quantised already; "
            "leave --weights away to serve them as they are",
            field="weights",
        )
    if kernels is not None and isinstance(backend, NativeAttention) and dtype == SERVED:
        pack = functools.partial(NativeLinears, kernels, backend.team, is_int8=is_int8)
        weights = PackedModel(directory, spec, dtype, is_int8, pack).load(with_head=with_head)
        return NativeTransformer(
            spec, weights, backend, kernels, is_deterministic=options.is_deterministic, collective=collective
        )
    if is_int8:
        raise ConfigError(
            "--weights int8 needs --dtype bfloat16 and a C++ compiler; "
            "leave --weights away to serve the weights as they are",
            field="weights",
        )
    linears = SteadyLinears() if options.is_deterministic else TorchLinears()
    weights = load_weights(directory, spec, dtype, with_head=with_head, linears=linears)
    return Transformer(spec, weights, backend, collective)


def load_weights(
    directory: Path, spec: ModelSpec, dtype: torch.dtype, *, with_head: bool, linears: Linears | None = None
) -> ModelWeights:
    """Loads the weights. `linears` makes their matrix products; None: torch's.

    Nothing that is returned lies in the model's files, which may be written to while the model is served. Raises
    ConfigError naming a tensor that is missing or has another shape than in the config.
    """
    with open_weights(directory, dtype) as files:
        source = balanced(named(_Copies(files), spec.whole), spec.whole)
        return take_products(shared_out(source, spec), spec, with_head=with_head, linears=linears or TorchLinears())


@dataclass(frozen=True, slots=True)
class _Copies:
    """A source of copies, so that no tensor lies in the mapped files of the other source."""

    files: WeightSource

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Raises what the files raise."""
        return self.files.take(name, *shape).clone()

    def take_matrix(self, name: str, rows: int, inputs: int) -> Matrix:
        """Raises what the files raise."""
        matrix = self.files.take_matrix(name, rows, inputs)
        return matrix.clone() if isinstance(matrix, torch.Tensor) else matrix


def stored_key_centers(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns `key_centers` of the model in a directory, None where its keys have no bias. The keys are balanced first,
    as in loading.

    Raises what opening the files raises.
    """
    if not spec.has_key_bias:
        return None
    with open_weights(directory, dtype) as files:
        return key_centers(balanced(named(files, spec), spec), spec)
