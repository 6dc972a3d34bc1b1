"""A real model over pages of one form: what one step stores and predicts, and what follows greedily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from tests.unit.kernels.pools.whole_pool import pool_over
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.choice import choose_kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kv_cache.form import page_form
from twostroke.models.catalog import places
from twostroke.models.decoders.choice import LoadOptions, load_model
from twostroke.models.page_forms.balanced_keys import balanced, key_centers
from twostroke.models.registry import read_spec
from twostroke.models.rope import rope_tables
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.formats import open_weights
from twostroke.page_forms.page_form import PageShape

BLOCK: Final = 16
CHUNK: Final = 256
"""Tokens computed at a time: later chunks read what earlier ones stored, as do the tokens of a chunk themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel:
    """A model's files on this machine, and what computes with them."""

    config: ModelConfig
    directory: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    kernels: Kernels | None
    team: Team | None
    key_centers: torch.Tensor | None

    @property
    def shape(self) -> PageShape:
        return self.spec.page_shape(BLOCK)

    def encode(self, text: str) -> torch.Tensor:
        """Returns int64 [tokens], without those that a tokenizer puts around a text."""
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)


@contextmanager
def local_model(config: ModelConfig, threads: int) -> Iterator[LocalModel]:
    """Yields the model, computing on so many threads. Raises ConfigError where it is not on this machine."""
    directory = places.locate(config.model, config.dtype)
    if directory is None:
        raise ConfigError(
            f"{config.model} in {config.dtype} is not on this machine: `twostroke model pull {config.model}`",
            field="model",
        )
    torch.set_num_threads(threads)
    kernels = choose_kernels(places.cache_dir() / "kernels")
    team = None if kernels is None else Team(kernels, tuple(range(threads)))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    try:
        spec = read_spec(directory)
        with open_weights(directory, getattr(torch, config.dtype)) as files:
            centers = key_centers(balanced(files, spec), spec)
        yield LocalModel(config, directory, spec, tokenizer, kernels, team, centers)
    finally:
        if team is not None:
            team.close()


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens of one sequence that one step computes."""

    tokens: torch.Tensor
    """int64 [tokens]"""
    start: int
    """The first one's position; pages hold all tokens before it."""
    table: torch.Tensor
    """int64 [blocks]: the sequence's pages, those of the tokens to come included."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.start, self.end)


class FormModel:
    """The model over a pool of pages of one form."""

    def __init__(self, model: LocalModel, form: str, tokens: int) -> None:
        """`tokens` are what the pool holds, and one more than the largest position."""
        spec, kind = model.spec, getattr(torch, model.config.dtype)
        self._team = model.team
        self.data = torch.zeros(-(-tokens // BLOCK), page_form(form).page_bytes(model.shape), dtype=torch.uint8)
        """The pages, uint8 [blocks, page bytes]."""
        attention = choose_attention(
            pool_over(self.data, page_form(form), model.shape, kind, model.key_centers),
            heads=spec.heads,
            rules=spec.rules,
            kernels=model.kernels,
            dtype=kind,
            team=model.team,
        )
        self._model = load_model(model.directory, spec, attention, model.kernels, LoadOptions(dtype=kind))
        self._cosines, self._sines = rope_tables(spec.ropes, tokens)

    @torch.inference_mode()
    def step(self, spans: Sequence[Span], rows: torch.Tensor | None) -> torch.Tensor | None:
        """Stores keys and values of all tokens; returns float32 logits [rows, vocab] of what follows these rows."""
        at = torch.cat([span.positions for span in spans])
        tables = torch.nn.utils.rnn.pad_sequence([span.table for span in spans], batch_first=True)
        pages = torch.cat([span.table[span.positions // BLOCK] for span in spans])
        batch = RaggedBatch(
            positions=at.int(),
            query_starts=(0, *accumulate(len(span.tokens) for span in spans)),
            context_lens=tuple(span.end for span in spans),
            block_tables=tables.int(),
            write_slots=pages * BLOCK + at % BLOCK,
            cosines=self._cosines[at],
            sines=self._sines[at],
        )
        tokens = torch.cat([span.tokens for span in spans]).int()
        if self._team is None:
            logits = self._model.forward(tokens, batch, rows)
        else:
            with self._team.step():
                logits = self._model.forward(tokens, batch, rows)
        return None if logits is None else logits.float()

    def store(self, tokens: torch.Tensor) -> None:
        """Fills the first pages of the pool with a sequence, chunk by chunk."""
        for span in self._chunks(tokens):
            self.step([span], None)

    def log_probabilities(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields float32 [positions, vocab] of what follows each position, chunk by chunk."""
        for span in self._chunks(tokens):
            logits = self.step([span], torch.arange(len(span.tokens)))
            assert logits is not None, "rows were asked for"
            yield logits.log_softmax(dim=-1)

    def greedy(self, spans: Sequence[Span], tokens: int) -> torch.Tensor:
        """Returns int64 [spans, tokens]: after each span the likeliest token, and so on."""
        found: list[torch.Tensor] = []
        for _ in range(tokens):
            last = torch.tensor([len(span.tokens) for span in spans]).cumsum(0) - 1
            logits = self.step(spans, last)
            assert logits is not None, "rows were asked for"
            found.append(logits.argmax(dim=1))
            each = found[-1][:, None]
            spans = [replace(span, tokens=one, start=span.end) for span, one in zip(spans, each, strict=True)]
        return torch.stack(found, dim=1)

    def _chunks(self, tokens: torch.Tensor) -> Iterator[Span]:
        table = torch.arange(-(-len(tokens) // BLOCK))
        for start in range(0, len(tokens), CHUNK):
            yield Span(tokens[start : start + CHUNK], start, table)
