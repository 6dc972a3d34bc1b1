"""What a model predicts over pages of one form, and how far that is from what it predicts over pages of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from twostroke.kernels.attention import RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.page_conversion import convert_page
from twostroke.kernels.page_pool import PagePool
from twostroke.kv_cache.form import FORMS, Conversion
from twostroke.models.choice import load_model
from twostroke.models.rope import rope_tables
from twostroke.models.spec import ModelSpec

BLOCK = 16
CHUNK = 256
"""Tokens computed at a time: later chunks read what earlier ones stored, as do the tokens of a chunk themselves."""


@dataclass(frozen=True, slots=True)
class Quality:
    form: str
    page_bytes: int
    perplexity: float
    mean_kl: float
    """Mean over positions, in nats: how many more are needed to code what the compared form predicts."""
    same: float
    """Share of positions at which the likeliest token is the same."""


class Predicts(Protocol):
    def log_probabilities(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield float32 [positions, vocab] of what follows each position, chunk by chunk."""


class FormModel:
    """The model over pages of one form that hold a single sequence."""

    def __init__(
        self, directory: Path, spec: ModelSpec, dtype: str, form: str, tokens: int, kernels: Kernels | None
    ) -> None:
        kind: torch.dtype = getattr(torch, dtype)
        shape = spec.page_shape(BLOCK)
        self._blocks = -(-tokens // BLOCK)
        self.data = torch.zeros(self._blocks, FORMS[form].page_bytes(shape), dtype=torch.uint8)
        """The pages, uint8 [blocks, page bytes]."""
        pool = PagePool.over(self.data, FORMS[form], shape)
        attention = choose_attention(pool, heads=spec.heads, scale=spec.head_dim**-0.5, kernels=kernels, dtype=kind)
        self._model = load_model(directory, spec, attention, kernels, dtype=kind, is_int8=False, with_head=True)
        self._cosines, self._sines = rope_tables(spec.rope, tokens)

    def log_probabilities(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        for start in range(0, len(tokens), CHUNK):
            at = torch.arange(start, min(start + CHUNK, len(tokens)))
            batch = RaggedBatch(
                positions=at.int(),
                query_starts=(0, len(at)),
                context_lens=(int(at[-1]) + 1,),
                block_tables=torch.arange(self._blocks, dtype=torch.int32)[None],
                write_slots=at,
                cosines=self._cosines[at],
                sines=self._sines[at],
            )
            logits = self._model.forward(tokens[at].int(), batch, torch.arange(len(at)))
            assert logits is not None, "the model has a head"
            yield logits.float().log_softmax(dim=-1)


class ConvertedModel:
    """The model over pages of one form, where those of all earlier chunks were computed in another and converted."""

    def __init__(self, source: FormModel, target: FormModel, conversion: Conversion) -> None:
        self._source = source
        self._target = target
        self._conversion = conversion

    def log_probabilities(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        chunks = zip(self._source.log_probabilities(tokens), self._target.log_probabilities(tokens), strict=True)
        for number, (_, found) in enumerate(chunks):
            yield found
            for block in range(number * CHUNK // BLOCK, min((number + 1) * CHUNK, len(tokens)) // BLOCK):
                convert_page(self._conversion, self._source.data[block], self._target.data[block])


@torch.inference_mode()
def compare(exact: Predicts, others: Mapping[str, Predicts], windows: list[torch.Tensor]) -> dict[str, list[float]]:
    """Return [negative log likelihood, KL, same], each a mean over all positions, of "" (the exact one) and others."""
    sums = {name: [0.0, 0.0, 0.0] for name in ("", *others)}
    positions = 0
    for window in windows:
        streams = {name: model.log_probabilities(window) for name, model in (("", exact), *others.items())}
        for start in range(0, len(window), CHUNK):
            following = window[start + 1 : start + 1 + CHUNK]
            chunks = {name: next(stream)[: len(following)] for name, stream in streams.items()}
            truth = chunks[""]
            positions += len(following)
            for name, found in chunks.items():
                own = sums[name]
                own[0] -= float(found.gather(1, following[:, None]).sum())
                own[1] += float((truth.exp() * (truth - found)).sum())
                own[2] += float((found.argmax(1) == truth.argmax(1)).sum())
    return {name: [each / positions for each in own] for name, own in sums.items()}
