"""Defines the input and the result of one engine step as frozen, picklable data in host memory.

T tokens of S sequences lie end to end (ragged). Sequence s owns tokens query_starts[s]:query_starts[s+1].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twostroke.request import PromptLogprobs, SampledToken, SamplingParams

MOST_EXTRA_LOGITS = 128
"""Most tokens of one step with wanted logits, besides the last token of each sequence. They are proposed tokens, and
tokens of prompts with logprobs. A float32 for each token of a vocabulary of 152,000 makes 78 MB; and products with 128
rows are nearly as fast per row as with more."""


class SampleRow(NamedTuple):
    """Parameters for drawing the next token of sequence `row`."""

    row: int
    params: SamplingParams
    position: int
    """Index of the new token in prompt + output, 0-based: the noise's counter."""
    banned: tuple[int, ...] = ()
    """Token ids that must not be drawn here (end of sequence before min_tokens)."""
    prompt: tuple[int, ...] = ()
    """Token ids of the prompt; empty unless penalties are on."""
    output: tuple[int, ...] = ()
    """Token ids of the output; empty unless penalties are on."""
    mask: npt.NDArray[np.uint32] | None = None
    """Tokens that may be drawn, one bit each (`twostroke.base.token_mask.Mask`). None: all."""
    behind: int = 0
    """Number of proposed tokens of the sequence that come after the token at which this row samples."""


class ScoreRow(NamedTuple):
    """Wanted prompt logprobs of sequence `row`, for its tokens from the first one in this step on."""

    row: int
    targets: tuple[int, ...]
    """The prompt token after each of these tokens, whose logprob is wanted."""
    top: int
    """Number of most likely tokens whose logprobs are wanted, too."""


@dataclass(slots=True)
class FeatureRows:
    """What features add to the rows of a step while it is built."""

    end_tokens: tuple[int, ...]
    """Token ids that end an answer."""
    masks: dict[int, list[npt.NDArray[np.uint32]]] = field(default_factory=dict)
    """Tokens that may come after the last known token of a row, and after each proposed one."""
    scores: list[ScoreRow] = field(default_factory=list)
    weights: dict[int, bytes] = field(default_factory=dict)
    """Digest of the weights of each row that has some beside the model's."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlaces:
    """The places of a step in one page group. A row is a page of the group's own, counted from its first."""

    block_tables: npt.NDArray[np.int32]
    """[S, widest] row of each block's page. Blocks that the group hides from all tokens of the step are not
    read: their rows may be any valid ones."""
    write_slots: npt.NDArray[np.int64]
    """[T] row * block_size + offset where the token's KV goes; the scratch row takes what is not kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    tokens: npt.NDArray[np.int32]
    """[T] token ids."""
    positions: npt.NDArray[np.int32]
    """[T] position of each token in its sequence, 0-based."""
    query_starts: npt.NDArray[np.int32]
    """[S + 1] first token of each sequence; the last entry is T."""
    context_lens: npt.NDArray[np.int32]
    """[S] tokens that the last query token of each sequence attends to, itself included."""
    block_tables: npt.NDArray[np.int32]
    """[S, widest] page of each block in the first page group, zero-padded on the right."""
    write_slots: npt.NDArray[np.int64]
    """[T] page * block_size + offset where the token's KV goes; the scratch page takes what is not kept."""
    samples: tuple[SampleRow, ...] = ()
    """Rows to sample, ordered by sequence and then by token."""
    scores: tuple[ScoreRow, ...] = ()
    weights: tuple[bytes | None, ...] = ()
    """[S] digest of the weights that each sequence uses besides the model's; empty if no sequence uses others."""
    released: tuple[int, ...] = ()
    """Pages of the first group with blocks that were finished or given up since the step before. What is kept for them
    besides the page can be freed."""
    further: tuple[GroupPlaces, ...] = ()
    """Places in each further page group. Empty where a model has one group."""

    def without_draws(self) -> Batch:
        """Returns the same step for processes that compute logits and draw nothing from them."""
        rows = [SampleRow(row.row, row.params, row.position, behind=row.behind) for row in self.samples]
        return replace(self, samples=tuple(rows))

    @property
    def sequences(self) -> int:
        return len(self.context_lens)

    @property
    def proposed_tokens(self) -> int:
        """Tokens that were proposed: each has a sample of its own besides that of its sequence."""
        return len(self.samples) - len({sample.row for sample in self.samples})

    @property
    def has_prompts(self) -> bool:
        """Whether it computes more than the last known token of each sequence and proposed ones."""
        return len(self.tokens) - self.proposed_tokens > self.sequences

    @property
    def scored_tokens(self) -> int:
        """Number of tokens with logits that are wanted for logprobs of prompts."""
        return sum([len(score.targets) for score in self.scores])

    @property
    def logit_rows(self) -> list[int]:
        """Tokens with wanted logits: those of `samples`, then those of `scores`."""
        starts = self.query_starts.tolist()
        rows = [starts[sample.row + 1] - 1 - sample.behind for sample in self.samples]
        for score in self.scores:
            rows += range(starts[score.row], starts[score.row] + len(score.targets))
        return rows


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: tuple[SampledToken, ...]
    """Sampled tokens, one per row of `Batch.samples`, in order."""
    seconds: float
    """Seconds that the step took on the device."""
    scores: tuple[PromptLogprobs, ...] = ()
    """One per row of `Batch.scores`, in order."""


class Runner(Protocol):
    """Runs one model on one device. Only the engine thread calls `run`."""

    def run(self, batch: Batch) -> StepResult: ...

    def close(self) -> None: ...
