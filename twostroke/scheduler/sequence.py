"""A sequence has known tokens (prompt + emitted) and computed ones (tokens with KV in its pages).

Everything that happens to a sequence either makes a token known (sampling) or lets computed catch up: a prefix hit, an
arriving page, a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from twostroke.base.ids import BlockHash, PageId, RequestId, SessionId
from twostroke.kv_cache.block import extend_hashes, root_hash
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.request import PromptLogprobs, SamplingParams
from twostroke.scheduler.batch import FeatureRows
from twostroke.scheduler.reading import Proposer, TokenReader


class Demand(NamedTuple):
    """What a sequence needs of a step. It is a tuple because one is made per running sequence in every step."""

    start: int
    """Position of the first token that runs."""
    most: int
    """Tokens that could run at once: all known ones from `start` on."""
    least: int = 0
    """Tokens that run at once at least, however little the token budget leaves."""
    weight: int = 1
    """Tokens of the budget that each of its tokens takes."""
    logits: int = 0
    """Logits that each of its tokens needs, besides those after the last known one."""
    ends_on_blocks: bool = True
    """A chunk that ends early is cut back to a block boundary, where the worker aligns chunks."""
    is_stream: bool = False
    """Whether it runs beside streams as one of them: the budget for prompts does not count it."""


class FurtherPages(Protocol):
    """What a running sequence holds of a page group beside the first one."""

    @property
    def slots(self) -> Mapping[int, PageId]:
        """The sequence's pages by their blocks."""

    @property
    def pulled_depth(self) -> int:
        """Leading blocks that a pull or a load is to bring. Computing starts after them."""


class Constraint:
    """The influence of one feature on the steps of a sequence. A method does nothing unless a feature overrides it."""

    def may_begin(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence may claim its pages now; if not, it is called again later."""
        return True

    def began(self, sequence: Sequence) -> None:
        """Takes note that the sequence has its pages."""

    def demand(self, sequence: Sequence, demand: Demand) -> Demand:
        """Returns the demand as this feature changes it."""
        return demand

    def fill(self, rows: FeatureRows, row: int, sequence: Sequence, tokens: range, proposed: tuple[int, ...]) -> None:
        """Adds to a step what it needs for this sequence. The sequence's chunk has these positions."""

    def ran(self, sequence: Sequence, start: int, end: int) -> None:
        """Takes note that a step has computed these tokens; it has not been applied to the sequence yet."""

    def scored(self, scores: PromptLogprobs) -> None:
        """Receives prompt logprobs that a step has computed for the sequence."""

    def passed(self, sequence: Sequence, before: int) -> None:
        """Takes note that blocks of others advanced the sequence. It had computed `before` tokens."""

    def most_ahead(self, sequence: Sequence, most: int) -> int:
        """Returns how many of `most` proposed tokens may run after the known ones."""
        return most

    def permitted(self, tokens: tuple[int, ...]) -> int:
        """Returns how many leading ones of these proposed tokens may come next."""
        return len(tokens)

    def releases(self, sequence: Sequence) -> None:
        """Takes note that the sequence is about to release its pages. It may hold none."""

    def preempted(self, sequence: Sequence) -> None:
        """Forgets what has to be computed again, after the pages are released."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a scheduler. Only that scheduler changes it."""

    request_id: RequestId
    session: SessionId
    """The sequence's identity as a writer of pages."""
    known: list[int]
    prompt_tokens: int
    """Length of the prompt; the rest of `known` is the output so far."""
    block_hashes: list[BlockHash]
    """Hashes of the full blocks of `known`; grows as blocks fill."""
    salt: bytes = b""
    sampling: SamplingParams | None = None
    """None: build pages only (a prefill job)."""
    constraints: tuple[Constraint, ...] = ()
    """Features that change its steps, in the order in which they change its demand."""
    reader: TokenReader | None = None
    """Decides which of the drawn tokens become known. None: each one does."""
    proposer: Proposer | None = None
    """Proposes its next tokens. None: each step makes one of them known."""
    public_blocks: int = 0
    """Number of leading blocks with hashes without a salt."""
    computes_all: bool = False
    """The sequence computes all tokens of its prompt itself, into pages of its own, and finds none that are here. Its
    blocks get their hashes as they are computed."""
    computed: int = 0
    pages: list[PageId] = field(default_factory=list)
    further: FurtherPages | None = None
    """None while it waits, and where there is one page group."""
    hit_blocks: int = 0
    """Leading blocks that were here when it was first admitted."""
    pulled_blocks: int = 0
    """Leading blocks that are to come from another worker."""
    loaded_blocks: int = 0
    """Number of leading blocks after which it can continue once local suppliers have loaded theirs; 0 if they load
    nothing, or if there is one page group."""
    pending_tokens: int = 0
    """Last tokens of `known` that will probably be computed here, while it waits."""
    passes: int = 0
    """Number of sequences that were admitted past it while it waited."""
    computed_blocks: set[int] = field(default_factory=set)
    """Blocks of the prompt that forward passes here compute for it, where there are several page groups."""
    claimable_at: int = 0
    """While it waits: the value of the pool's `gains` before which its pages cannot be claimed."""
    preemptions: int = 0
    steps: int = 0
    """Steps that it took part in."""
    due_s: float | None = None
    """Time on the worker's clock by which its first token was promised."""
    ended: bool = False

    @property
    def answer_tokens(self) -> int:
        return len(self.known) - self.prompt_tokens

    @property
    def first_query(self) -> int:
        """Start of the next forward pass. A fully computed sequence that samples runs its last token again."""
        return min(self.computed, len(self.known) - 1) if self.sampling else self.computed

    @property
    def next_start(self) -> int:
        """Position of the first token that runs next. A fully computed sequence may run computed tokens again."""
        return self.computed if self.computed < len(self.known) else self.demand().start

    def demand(self) -> Demand:
        """Returns what it needs of the next step."""
        start = self.first_query
        demand = Demand(start, len(self.known) - start)
        for constraint in self.constraints:
            demand = constraint.demand(self, demand)
        return demand

    def set_pending(self, held_blocks: int, block_size: int) -> None:
        """Sets the pending tokens when a wait begins, given that its first `held_blocks` blocks are here."""
        spared = max(held_blocks, self.pulled_blocks) * block_size
        self.pending_tokens = max(len(self.known) - spared, 1 if self.sampling else 0)

    @property
    def pending_pairs(self) -> float:
        return self.pending_tokens * (len(self.known) - self.pending_tokens / 2)

    def extend_hashes(self, block_size: int, end: int | None = None) -> None:
        """Appends the hashes of further blocks that known tokens fill; with `end`, only the first `end` of them."""
        extend_hashes(self.block_hashes, self.known, block_size, self.salt, self.public_blocks, end=end)

    def page_of(self, part: Part) -> PageId | None:
        """Returns the page in which it holds a part; None where it holds none, as after its end."""
        if part.group is GroupKind.FULL:
            return self.pages[part.block] if part.block < len(self.pages) else None
        return None if self.further is None else self.further.slots.get(part.block)

    def pages_of(self, parts: TokenSequence[Part]) -> dict[Part, PageId]:
        """Returns the pages of those of the parts that it holds."""
        return {part: page for part in parts if (page := self.page_of(part)) is not None}

    def parent_of(self, block: int) -> BlockHash:
        return self.block_hashes[block - 1] if block else root_hash()


def building(
    request_id: RequestId,
    session: SessionId,
    tokens: TokenSequence[int],
    hashes: TokenSequence[BlockHash],
    constraints: tuple[Constraint, ...] = (),
) -> Sequence:
    """Returns a sequence that only builds the pages of `hashes`; `tokens` fill them exactly."""
    return Sequence(request_id, session, list(tokens), len(tokens), list(hashes), constraints=constraints)
