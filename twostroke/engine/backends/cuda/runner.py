"""One real model on a CUDA device: decode steps as recorded graphs, and steps with prompt chunks without recordings.

A step costs one copy to the device (everything about the batch, packed) and one back (the tokens). For rows that
are drawn, among all tokens or those that a grammar permits, the device proposes tokens and the host decides. Rows that
ask for more (penalties, bias, logprobs) send their logits and go through the sampler that serves the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from twostroke.base.errors import EngineLost
from twostroke.engine.backends.cuda.accelerator import Accelerator
from twostroke.engine.backends.cuda.decode_graphs import DecodeGraphs, DecodeInputs, PageTable, graph_sizes
from twostroke.engine.backends.cuda.staging import HostArray, Staging, packed_offsets
from twostroke.engine.sampling.device_sampler import draw_rows
from twostroke.engine.sampling.prompt_scores import score_prompts
from twostroke.engine.sampling.sampler import UNSOUND, is_plain_greedy, is_unadjusted, sample
from twostroke.kernels.attention.interface import RaggedBatch, RaggedPlaces
from twostroke.kernels.attention.spans import TokenSlots
from twostroke.kernels.page_forms.exact_pages import ExactPlaces
from twostroke.kernels.pools.parted_pool import RecordedAttention
from twostroke.models.decoders.device_model import EVERY_ROW, DeviceModel
from twostroke.models.expert_load import ExpertLoad
from twostroke.request import PromptLogprobs, SampledToken
from twostroke.scheduler.batch import MOST_EXTRA_LOGITS, Batch, GroupPlaces, SampleRow, StepResult

Picked = TypeVar("Picked")

NO_TOKEN = -1
"""Stands for no token in tensors of tokens on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The dimensions of the largest step."""

    max_tokens: int
    max_sequences: int
    pages: PageTable


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStepOutput:
    """What a step leaves on the device."""

    greatest: torch.Tensor
    """int64 [rows]: each row's likeliest token, NO_TOKEN where the row is not sound"""
    logits: torch.Tensor
    """[rows, vocab]"""
    rows: list[int]
    """The row of each sample."""
    scored: torch.Tensor | None
    """[scored tokens, vocab]; None where nothing is scored."""


class DeviceRunner:
    """Warms up and records when it is made. Only the engine thread calls `run`. `with_head`: whether it ever
    samples."""

    def __init__(
        self,
        model: DeviceModel,
        attention: RecordedAttention,
        rope: tuple[torch.Tensor, torch.Tensor],
        accelerator: Accelerator,
        limits: StepLimits,
        exact: ExactPlaces,
        *,
        with_head: bool,
    ) -> None:
        self._exact = exact
        self._model = model
        self._collective = model.collective
        self._attention = attention
        self._cosines, self._sines = rope
        self._accelerator = accelerator
        self._limits = limits
        self._staging = Staging(_staging_bytes(limits), accelerator.device)
        is_cuda = accelerator.device.type == "cuda"
        self._tokens = torch.zeros(limits.max_sequences, dtype=torch.int64, pin_memory=is_cuda)
        self._graphs: DecodeGraphs | None = None
        with accelerator.guard(), torch.inference_mode():
            if with_head:
                sizes = graph_sizes(limits.max_sequences)
                self._graphs = DecodeGraphs(self._decode, accelerator, sizes, limits.pages, exact)
            self._warm_up()  # last, because a recording gives unused memory back
            model.forget_load()

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Tokens that each expert has computed, counted as steps run; None for a dense model."""
        return self._model.expert_load

    def run(self, batch: Batch) -> StepResult:
        """Runs a step. Raises EngineLost where the device has failed: nothing that runs on it afterwards can be
        trusted."""
        try:
            return self._run(batch)
        except torch.AcceleratorError as error:  # not raised for lack of memory
            raise EngineLost(f"the device failed: {error}") from error

    def _run(self, batch: Batch) -> StepResult:
        started_s = time.perf_counter()
        with self._accelerator.guard(), torch.inference_mode():
            with self._collective.step(batch):
                answers = self.launch(batch)
                self._model.publish_load()
                likeliest = self._awaited(answers)
            tokens: tuple[SampledToken, ...] = ()
            scores: tuple[PromptLogprobs, ...] = ()
            if answers is not None:
                tokens = self._sampled(answers, batch, likeliest)
                scores = () if answers.scored is None else score_prompts(answers.scored, batch.scores)
        return StepResult(tokens, time.perf_counter() - started_s, scores)

    def close(self) -> None:
        """Drops weights, recordings and the view of the pages, so that their memory can be given back."""
        del self._graphs, self._model, self._attention
        self._collective.close()  # last: recordings contain its sums

    def launch(self, batch: Batch) -> DeviceStepOutput | None:
        """Starts a step, and returns the tensors that it will fill on the device.

        Returns None where nothing is sampled, as on processes other than the first. The step must have ended before the
        next one starts.
        """
        if self._graphs is not None and self._graphs.takes(batch):
            outputs = self._graphs.run(batch)
            if not outputs:
                return None
            greatest, logits = outputs
            return DeviceStepOutput(greatest, logits, [row.row for row in batch.samples], None)
        logits_or_none = self.logits(batch)
        if logits_or_none is None:
            return None
        count = len(batch.samples)
        sampled, scored = logits_or_none[:count], logits_or_none[count:] if batch.scores else None
        return DeviceStepOutput(_greatest(sampled), sampled, list(range(count)), scored)

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Launches what writes the KV of all tokens. Returns the logits of `batch.logit_rows`, or None where there are
        none."""
        starts = batch.query_starts.tolist()
        rows = np.array(batch.logit_rows, np.int64)
        of_token = np.repeat(np.arange(batch.sequences), np.diff(batch.query_starts))
        exact = self._exact.begin(of_token, batch.block_tables, batch.positions, batch.released)
        places = [array for own in batch.further for array in (own.block_tables, own.write_slots)]
        exact_slots, slots, tokens, positions, sample_rows, tables, *others = self._staging.upload(
            [exact, batch.write_slots, batch.tokens, batch.positions, rows, batch.block_tables, *places]
        )
        ragged = RaggedBatch(
            positions=positions,
            query_starts=tuple(starts),
            context_lens=tuple(batch.context_lens.tolist()),
            block_tables=tables,
            write_slots=slots,
            cosines=self._cosines[positions],
            sines=self._sines[positions],
            exact_slots=exact_slots,
            further=tuple(map(RaggedPlaces, others[::2], others[1::2])),
        )
        return self._model.forward(tokens, positions, self._attention.begin(ragged), sample_rows if len(rows) else None)

    def _decode(self, inputs: DecodeInputs) -> tuple[torch.Tensor, ...]:
        """Returns what is recorded: (likeliest tokens, logits) of every row, or an empty tuple on processes other than
        the first."""
        positions = inputs.positions
        angles = self._cosines[positions], self._sines[positions]
        placement = TokenSlots(inputs.write_slots, *angles, inputs.exact_slots, inputs.further)
        step = self._attention.begin_decode(inputs.spans, placement)
        logits = self._model.forward(inputs.tokens, positions, step, EVERY_ROW, inputs.count)
        return () if logits is None else (_greatest(logits), logits)

    def _awaited(self, answers: DeviceStepOutput | None) -> list[int]:
        """Waits for the device, whose pages may be read from then on, and returns the likeliest token of each row."""
        if answers is None:
            self._accelerator.synchronize()
            return []
        greatest = self._tokens[: len(answers.greatest)]
        greatest.copy_(answers.greatest, non_blocking=True)
        self._accelerator.synchronize()
        tokens: list[int] = greatest.tolist()
        return tokens

    def _sampled(self, answers: DeviceStepOutput, batch: Batch, likeliest: list[int]) -> tuple[SampledToken, ...]:
        """Returns one token per sample."""
        tokens = [UNSOUND if likeliest[row] == NO_TOKEN else SampledToken(likeliest[row]) for row in answers.rows]
        asking = [
            index for index, row in enumerate(batch.samples) if tokens[index].is_sound and not is_plain_greedy(row)
        ]
        drawn = [index for index in asking if is_unadjusted(batch.samples[index])]
        others = [index for index in asking if index not in drawn]
        for index, token in _pick(draw_rows, answers, batch, drawn):
            if token is None:
                others.append(index)
            else:
                tokens[index] = token
        for index, token in _pick(_sample_on_host, answers, batch, others):
            tokens[index] = token
        return tuple(tokens)

    def _warm_up(self) -> None:
        """Runs chunks of all magnitudes over the scratch page: kernels are compiled and memory is allocated now, not
        later."""
        most = min(self._limits.max_tokens, self._limits.pages.max_positions)
        for count in (most, *(1 << power for power in range(most.bit_length() - 1))):
            self.logits(_scratch_chunk(count, self._limits.pages))
            self._accelerator.synchronize()  # before the next one is packed into the same buffer


def _greatest(logits: torch.Tensor) -> torch.Tensor:
    """Returns the likeliest token of each row, as the sampler finds it; NO_TOKEN for a row that has infinite logits or
    NaN."""
    greatest = logits.argmax(dim=-1)
    is_sound = logits.gather(-1, greatest[..., None])[..., 0].isfinite()
    return greatest.masked_fill_(~is_sound, NO_TOKEN)


def _pick(
    sampler: Callable[[torch.Tensor, Sequence[SampleRow]], Sequence[Picked]],
    answers: DeviceStepOutput,
    batch: Batch,
    indices: Sequence[int],
) -> Iterator[tuple[int, Picked]]:
    """Yields what `sampler` makes of the logits of some of the samples, by their indices."""
    if indices:
        logits = answers.logits[[answers.rows[index] for index in indices]]
        yield from zip(indices, sampler(logits, [batch.samples[index] for index in indices]), strict=True)


def _sample_on_host(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[SampledToken, ...]:
    return sample(logits.cpu(), rows)


def _scratch_chunk(count: int, pages: PageTable) -> Batch:
    """Returns a prompt of `count` tokens whose pages are all the scratch page."""
    positions = np.arange(count, dtype=np.int32)
    first, *others = (
        GroupPlaces(
            np.full((1, -(-count // pages.block_size)), page, np.int32),
            page * pages.block_size + positions.astype(np.int64) % pages.block_size,
        )
        for page in (pages.scratch_page, *pages.further_scratch_rows)
    )
    return Batch(
        tokens=np.zeros(count, np.int32),
        positions=positions,
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=first.block_tables,
        write_slots=first.write_slots,
        further=tuple(others),
    )


def _staging_bytes(limits: StepLimits) -> int:
    """Returns the staging bytes of the largest step."""
    tokens, sequences = limits.max_tokens, limits.max_sequences
    arrays: list[HostArray] = [
        np.empty(tokens, np.int64),
        np.empty(tokens, np.int64),
        np.empty(tokens, np.int32),
        np.empty(tokens, np.int32),
        np.empty(sequences + min(tokens, MOST_EXTRA_LOGITS), np.int64),
        np.empty((sequences, limits.pages.max_blocks), np.int32),
    ]
    for _ in limits.pages.further_scratch_rows:
        arrays += [np.empty((sequences, limits.pages.max_blocks), np.int32), np.empty(tokens, np.int64)]
    return packed_offsets(arrays)[-1]
