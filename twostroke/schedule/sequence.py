"""A sequence has known tokens (prompt + emitted) and computed ones (those whose KV lies in its pages).

Everything that happens to a sequence either makes a token known (sampling) or lets computed catch up: a prefix hit, an
arriving page, a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field

from twostroke.ids import BlockName, PageId, RequestId, SessionId
from twostroke.kv_cache.block import extend_names, root_name
from twostroke.request import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by one scheduler, which alone changes it."""

    request_id: RequestId
    session: SessionId
    """Its name as a writer of pages."""
    known: list[int]
    prompt_tokens: int
    """How many of `known` were the prompt; the rest is the answer so far."""
    names: list[BlockName]
    """Of the full blocks of `known`; grows as blocks fill."""
    salt: bytes = b""
    sampling: SamplingParams | None = None
    """None: build pages only (a prefill job)."""
    public_blocks: int = 0
    """How many of the first blocks have names without the salt."""
    computed: int = 0
    pages: list[PageId] = field(default_factory=list)
    hit_blocks: int = 0
    """Leading blocks that were here when it was first admitted."""
    pulled_blocks: int = 0
    """Leading blocks that are to come from another worker."""
    owed_tokens: int = 0
    """While it waits: the last ones of `known` that will probably have to be computed here."""
    passes: int = 0
    """How often others were admitted past it while it waited."""
    preemptions: int = 0
    steps: int = 0
    """That it had a part in."""
    ended: bool = False

    @property
    def root(self) -> BlockName:
        return root_name()

    @property
    def answer_tokens(self) -> int:
        return len(self.known) - self.prompt_tokens

    @property
    def first_query(self) -> int:
        """Where the next forward pass starts. A sampling sequence that is fully computed runs its last token again."""
        return min(self.computed, len(self.known) - 1) if self.sampling else self.computed

    def owe(self, held_blocks: int, block_size: int) -> None:
        """It begins to wait, while the first `held_blocks` of its blocks are here."""
        spared = max(held_blocks, self.pulled_blocks) * block_size
        self.owed_tokens = max(len(self.known) - spared, 1 if self.sampling else 0)

    @property
    def owed_pairs(self) -> float:
        return self.owed_tokens * (len(self.known) - self.owed_tokens / 2)

    def extend_names(self, block_size: int) -> None:
        """Name the blocks that have become full of known tokens."""
        extend_names(self.names, self.known, block_size, self.salt, self.public_blocks)

    def parent_of(self, block: int) -> BlockName:
        return self.names[block - 1] if block else self.root


def building(
    request_id: RequestId, session: SessionId, tokens: TokenSequence[int], names: TokenSequence[BlockName]
) -> Sequence:
    """A sequence that only builds the pages of `names`; `tokens` fill them exactly."""
    return Sequence(request_id, session, list(tokens), len(tokens), list(names))
