"""A sequence has known tokens (prompt + emitted) and computed ones (those whose KV lies in its pages).

Everything that happens to a sequence either makes a token known (sampling) or lets computed catch up: a prefix hit, an
arriving page, a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field

from twostroke.grammar.state import GrammarState
from twostroke.ids import BlockHash, PageId, RequestId, SessionId
from twostroke.kv_cache.block import extend_hashes, root_hash
from twostroke.request import AdapterRef, PromptLogprobs, SamplingParams
from twostroke.speculation.speculation import Speculation


@dataclass(slots=True)
class HeldWindows:
    """The window parts that a running sequence holds, where they lie apart from pages."""

    slots: dict[int, PageId]
    """Slot of each block whose part it holds."""
    most: int | None
    """Slots that it spoke for when it began; None: it takes them one by one."""
    promised: int
    """Leading blocks that these slots are for: the parts of later blocks are taken beside them."""
    pulled_depth: int = 0
    """Blocks after which it goes on where a pull or a load brings all of them; 0 where none is to."""
    full_blocks: int = 0
    """Leading blocks whose pages are filled."""
    filled_parts: int = 0
    """Block before which the chunk that runs next finds window parts that are filled."""

    @property
    def committed(self) -> int:
        """Slots that nobody else may speak for."""
        return len(self.slots) if self.most is None else self.most


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by one scheduler, which alone changes it."""

    request_id: RequestId
    session: SessionId
    """Its identity as a writer of pages."""
    known: list[int]
    prompt_tokens: int
    """Length of the prompt; the rest of `known` is the output so far."""
    block_hashes: list[BlockHash]
    """Hashes of the full blocks of `known`; grows as blocks fill."""
    salt: bytes = b""
    sampling: SamplingParams | None = None
    """None: build pages only (a prefill job)."""
    grammar: GrammarState | None = None
    """What may come next, where the answer has to match a grammar."""
    speculation: Speculation | None = None
    """Proposes its next tokens. None: each step makes one of them known."""
    public_blocks: int = 0
    """Leading blocks whose hashes carry no salt."""
    adapter: AdapterRef | None = None
    needs_scores: bool = False
    """Logprobs of its prompt are wanted and not complete. Until then it computes all of its tokens itself, into pages
    of its own: pages that are here, or come from elsewhere, bring no logits."""
    scores: list[PromptLogprobs] = field(default_factory=list)
    """Logprobs of its prompt so far, step by step."""
    computed: int = 0
    pages: list[PageId] = field(default_factory=list)
    windows: HeldWindows | None = None
    """None while it waits, and where pages hold what all layers keep."""
    hit_blocks: int = 0
    """Leading blocks that were here when it was first admitted."""
    pulled_blocks: int = 0
    """Leading blocks that are to come from another worker."""
    loaded_blocks: int = 0
    """Leading blocks after which it can go on once lower tiers have brought what they hold; 0 where they bring nothing,
    and where window parts do not lie apart from pages."""
    pending_tokens: int = 0
    """Last tokens of `known` that will probably be computed here, while it waits."""
    passes: int = 0
    """Number of sequences that were admitted past it while it waited."""
    computed_blocks: set[int] = field(default_factory=set)
    """Blocks of the prompt that forward passes here compute for it, where window parts lie apart from pages."""
    preemptions: int = 0
    steps: int = 0
    """Steps that it took part in."""
    due_s: float | None = None
    """Time on the worker's clock by which its first token was promised."""
    ended: bool = False

    @property
    def root(self) -> BlockHash:
        return root_hash()

    @property
    def answer_tokens(self) -> int:
        return len(self.known) - self.prompt_tokens

    @property
    def first_query(self) -> int:
        """Start of the next forward pass. A fully computed sequence that samples runs its last token again."""
        return min(self.computed, len(self.known) - 1) if self.sampling else self.computed

    def set_pending(self, held_blocks: int, block_size: int) -> None:
        """Set the pending tokens at the begin of a wait, when its first `held_blocks` blocks are here."""
        spared = max(held_blocks, self.pulled_blocks) * block_size
        self.pending_tokens = max(len(self.known) - spared, 1 if self.sampling else 0)

    @property
    def pending_pairs(self) -> float:
        return self.pending_tokens * (len(self.known) - self.pending_tokens / 2)

    def extend_hashes(self, block_size: int, end: int | None = None) -> None:
        """Hash the blocks that have become full of known tokens, of the first `end` alone."""
        known = self.known if end is None or end >= len(self.known) else self.known[:end]
        extend_hashes(self.block_hashes, known, block_size, self.salt, self.public_blocks)

    def parent_of(self, block: int) -> BlockHash:
        return self.block_hashes[block - 1] if block else self.root


def building(
    request_id: RequestId,
    session: SessionId,
    tokens: TokenSequence[int],
    hashes: TokenSequence[BlockHash],
    adapter: AdapterRef | None = None,
) -> Sequence:
    """Return a sequence that only builds the pages of `hashes`; `tokens` fill them exactly."""
    return Sequence(request_id, session, list(tokens), len(tokens), list(hashes), adapter=adapter)
