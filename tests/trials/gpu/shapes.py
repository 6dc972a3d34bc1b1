"""Models of random weights, and steps over pages scattered at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.models.spec import ModelSpec, RopeSpec
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import Batch, SampleRow

BLOCK = 16
GREEDY = SamplingParams(seed=0, max_tokens=1 << 20, temperature=0)


def _spec(*, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, dim: int = 128) -> ModelSpec:
    frequencies = tuple(500000.0 ** (-2 * pair / dim) for pair in range(dim // 2))
    return ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=inner,
        vocab_size=vocab,
        max_position_embeddings=1 << 17,
        eos_token_ids=(),
        ropes=(RopeSpec(kind="default", inverse_frequencies=frequencies),),
        norm_epsilon=1e-5,
    )


LLAMA_8B = _spec(hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336, vocab=128256)
SMALL = _spec(hidden=1024, layers=8, heads=8, kv_heads=2, inner=2816, vocab=32000)
TINY = _spec(hidden=64, layers=2, heads=4, kv_heads=2, inner=96, vocab=160, dim=64)


@dataclass(frozen=True)
class RandomSource:
    """Instead of a model's files. Equal seeds make equal models where they are drawn on equal devices."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def seeded(cls, seed: int, device: torch.device, dtype: torch.dtype, drawn_on: torch.device) -> RandomSource:
        return cls(device, dtype, torch.Generator(drawn_on).manual_seed(seed))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.generator.device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0).to(self.device)
        # So that no layer makes its input much larger or smaller, whatever its width.
        return tensor.normal_(0.0, shape[-1] ** -0.5, generator=self.generator).to(self.device)

    def take_matrix(self, name: str, rows: int, inputs: int) -> torch.Tensor:
        return self.take(name, rows, inputs)


def decode_batch(contexts: Sequence[int], tables: np.ndarray, vocab: int) -> Batch:  # type: ignore[type-arg]
    """One greedy token each; row n of `tables` holds the pages of sequence n."""
    rows = len(contexts)
    last = np.array(contexts, np.int32) - 1
    used = -(-max(contexts) // BLOCK)
    own = tables[np.arange(rows), last // BLOCK].astype(np.int64)
    return Batch(
        tokens=np.arange(rows, dtype=np.int32) * 7919 % vocab,
        positions=last,
        query_starts=np.arange(rows + 1, dtype=np.int32),
        context_lens=last + 1,
        block_tables=tables[:, :used].astype(np.int32),
        write_slots=own * BLOCK + last % BLOCK,
        samples=tuple(SampleRow(row, GREEDY, position=int(last[row]) + 1) for row in range(rows)),
    )


def scattered_tables(rows: int, blocks: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """[rows, blocks] pages, each once, in no order."""
    return np.random.default_rng(seed).permutation(rows * blocks).reshape(rows, blocks).astype(np.int32)
