"""The beginning of a scheduler's history: an empty pool, a model whose KV is legible, and what is known of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from tests.unit.scheduler.features import all_branches
from tests.unit.scheduler.symbolic import (
    ExactRunner,
    ExactWindowedRunner,
    SymbolicMemory,
    SymbolicRunner,
    WindowedRunner,
    limits,
)
from twostroke.base.ids import BlockHash, PageId, SessionId
from twostroke.config import ScheduleConfig
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.shape import WindowShape
from twostroke.kv_cache.windows.window_group import WindowGroup, window_group, window_group_of
from twostroke.request import Grammar
from twostroke.scheduler.batch import StepResult
from twostroke.scheduler.batching import Step
from twostroke.scheduler.cost import Budget, StepCost
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence

MAX_MODEL_LEN = 30


@dataclass
class Pull:
    session: SessionId
    remaining: dict[PageId, BlockHash]
    parts: dict[PageId, BlockHash]
    """Slots of window parts."""


@dataclass
class Flight:
    step: Step
    held: dict[Sequence, set[PageId]]
    """What its sequences held when it began."""
    result: StepResult | None = None


def pages_held_by(sequence: Sequence) -> set[PageId]:
    """Returns the pages of all groups that a sequence holds."""
    return {*sequence.pages, *(() if sequence.further is None else sequence.further.slots.values())}


class Tight(Budget):
    """A budget with as few prompt tokens beside streams as the history likes."""

    def prompt_tokens(self, streams: int, context_tokens: int, prompt_context_tokens: int = 0) -> int:
        assert streams
        assert context_tokens >= streams
        return self.most_prompt_tokens


class BegunHistory(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(4, 14),
        budget=st.integers(1, 24),
        beside=st.none() | st.integers(1, 8),
        max_num_seqs=st.integers(1, 6),
        max_passes=st.integers(0, 3),
        align_chunks=st.booleans(),
        has_exact_blocks=st.booleans(),
        window=st.none() | st.integers(1, 12),
        spare_slots=st.integers(0, 8),
    )
    def begin(  # noqa: PLR0917  # hypothesis draws each
        self,
        block_size: int,
        pages: int,
        budget: int,
        beside: int | None,
        max_num_seqs: int,
        max_passes: int,
        align_chunks: bool,
        has_exact_blocks: bool,
        window: int | None,
        spare_slots: int,
    ) -> None:
        self.beside = None if beside is None else Tight(0.0, StepCost(step_s=1.0), beside)
        self.block_size = block_size
        self.memory = SymbolicMemory(pages, block_size)
        self.parts = SymbolicMemory(0, block_size)
        if window is None:
            self.pool = BlockPool(pages, self.memory)
            self.runner = (ExactRunner if has_exact_blocks else SymbolicRunner)(self.memory, self.pool)
        else:
            least = WindowShape(PageId(pages), 0, window, block_size, has_exact_blocks).least_slots
            shape = WindowShape(PageId(pages), least + spare_slots, window, block_size, has_exact_blocks)
            self.pool = BlockPool(pages, self.memory, window_group(shape, self.parts))
            windowed = ExactWindowedRunner if has_exact_blocks else WindowedRunner
            self.runner = windowed(self.memory, self.pool, self.parts, window)
        config = ScheduleConfig(
            max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_passes=max_passes, max_waiting=10**6
        )
        of = limits(block_size, max_model_len=MAX_MODEL_LEN, align_chunks=align_chunks)
        self.branches = all_branches(self.pool, of, has_exact_blocks=has_exact_blocks)
        self.scheduler = Scheduler(self.pool, config, of, branches=self.branches)
        self.flight: Flight | None = None
        self.live: list[Sequence] = []
        self.answers: dict[Sequence, list[int]] = {}
        self.content: dict[BlockHash, list[tuple[int, int]]] = {}
        """What each named block must hold."""
        self.texts: list[list[int]] = [[]]
        """Token lists seen so far: new prompts go on from them."""
        self.pulls: list[Pull] = []
        self.pins: list[list[PageId]] = []
        self.scored: set[Sequence] = set()
        """Sequences that want logprobs of their prompts."""
        self.grammars: dict[Sequence, Grammar] = {}
        """Those that their answers have to match."""
        self.numbers = 0
        self.seen: Counter[str] = Counter()

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def fits(self, tokens: int) -> bool:
        return -(-tokens // self.block_size) <= self.pool.total

    def learn(self, known: list[int], hashes: list[BlockHash]) -> None:
        for block, name in enumerate(hashes):
            start = block * self.block_size
            self.content[name] = [(p, known[p]) for p in range(start, start + self.block_size)]

    @property
    def windows(self) -> WindowGroup:
        windows = window_group_of(self.pool)
        assert windows is not None
        return windows
