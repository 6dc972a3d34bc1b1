"""A model of transformers whose attention stores keys and values in our pages, and reads what the pages hold."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from twostroke.kernels.attention.interface import AttentionBackend, AttentionStep, RaggedBatch
from twostroke.models.expert_load import ExpertLoad
from twostroke.models.generic.interface import PAGED, SINKS, AttentionCall, intercept
from twostroke.models.spec import ModelSpec

PLAIN_ATTENTION = "eager"
"""transformers' own attention that supports every option."""


class PagedAttention:
    """The attention of a model's layers, over pages. Layers call it in their order, each once per step."""

    def __init__(self, backend: AttentionBackend, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._backend = backend
        self._head_dim = spec.head_dim
        self._layers = spec.layers
        self._dtype = dtype
        self._step: AttentionStep | None = None
        self._next_layer = 0

    @contextmanager
    def step(self, batch: RaggedBatch) -> Iterator[None]:
        """Runs the body, a forward pass, with this batch."""
        self._step, self._next_layer = self._backend.begin(batch), 0
        try:
            yield
        finally:
            self._step = None
        assert self._next_layer == self._layers, f"{self._next_layer} of {self._layers} layers called attention"

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        assert self._step is not None, "attention outside of a step"
        layer, self._next_layer = self._next_layer, self._next_layer + 1
        q, k, v = (self._rows(each) for each in (call.query, call.key, call.value))
        width = v.shape[-1]
        if width < self._head_dim:
            v = functional.pad(v, (0, self._head_dim - width))
        sinks = call.options.get(SINKS)
        rotated = self._step.store(layer, q, k, v)
        attended = self._step.attend(layer, rotated, None if sinks is None else sinks.float())
        return attended.view(1, *q.shape)[..., :width]

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns [tokens, heads, width], heads side by side, of [1, heads, tokens, width]."""
        return heads[0].transpose(0, 1).to(self._dtype).contiguous()


class PagedModel:
    """A model whose steps run in transformers' code. `model` has its head, or is only the trunk."""

    def __init__(self, model: Any, spec: ModelSpec, backend: AttentionBackend, dtype: torch.dtype) -> None:
        self.expert_load: ExpertLoad | None = None
        self._model = model
        self._has_head = model.get_output_embeddings() is not None
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._attention = PagedAttention(backend, spec, dtype)
        intercept(model, self._attention)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, batch: RaggedBatch, sample_rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        with self._attention.step(batch):
            if sample_rows is None:
                self._run(self._model.base_model, tokens, batch.positions)
                return None
            assert self._has_head, "sampling on a worker without a head"
            if self._picks_rows:
                return self._outputs(tokens, batch.positions, logits_to_keep=sample_rows)
            return self._outputs(tokens, batch.positions)[sample_rows]

    @torch.inference_mode()
    def outputs(self, tokens: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """Returns the logits after each token of a step over pages, or the last hidden states of a model without a
        head."""
        with self._attention.step(batch):
            return self._outputs(tokens, batch.positions)

    @torch.inference_mode()
    def plain_outputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns what `outputs` returns, for a whole prompt with transformers' own attention and without pages."""
        self._model.set_attn_implementation(PLAIN_ATTENTION)
        try:
            return self._outputs(tokens, torch.arange(len(tokens)))
        finally:
            self._model.set_attn_implementation(PAGED)

    def products(self) -> Iterator[torch.nn.Linear]:
        """Returns the modules of all matrix products without quantised weights, the head's included."""
        return (module for module in self._model.modules() if isinstance(module, torch.nn.Linear))

    def _outputs(self, tokens: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
        out = self._run(self._model, tokens, positions, **options)
        rows: torch.Tensor = (out.logits if self._has_head else out.last_hidden_state)[0]
        return rows

    def _run(self, model: Any, tokens: torch.Tensor, positions: torch.Tensor, **options: Any) -> Any:
        return model(input_ids=tokens.long()[None], position_ids=positions.long()[None], use_cache=False, **options)
