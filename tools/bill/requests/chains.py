"""Requests of a log as chains of blocks: which blocks each looks up, and which it leaves behind in a pool.

A block's hash covers all tokens before it, so blocks form a tree and a request is a path from its root. Blocks of an
answer are not logged; where a later prompt continues a prompt and its answer, they are the blocks in between.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.oracle import full_blocks
from tools.simulate.traces.trace import Trace

ROOT = -1


class Answers(enum.StrEnum):
    """What becomes of the pages of an answer."""

    NONE = "none"
    """Pages of answers are not kept, as in the pool of a prefill worker."""
    KEPT = "kept"
    """Pages of answers stay in the pool, and no later prompt finds them: a replay, whose answers are new text."""
    FOUND = "found"
    """Prompts that continue a prompt and its answer find them, if they are long enough to hold the answer."""
    LOGGED = "logged"
    """A prompt finds them where the log says that its cached tokens reached into an earlier answer."""


@dataclass(frozen=True, slots=True)
class RequestChain:
    """One request, from the first block on."""

    blocks: tuple[int, ...]
    """Numbers of the blocks that other requests may share: of the prompt, then of the answer."""
    looked_up: int
    """Leading blocks that the request looks up: the full ones of its prompt."""
    length: int
    """All blocks that it leaves in the cache, also those of an answer that no later prompt shares."""


@dataclass(slots=True)
class _Open:
    """A request whose answer may still be found in a later prompt."""

    blocks: list[int]
    looked_up: int
    length: int


@dataclass(frozen=True, slots=True)
class RequestChains:
    chains: tuple[RequestChain, ...]
    """In order of arrival."""
    block_count: int
    """Distinct blocks in all `blocks`."""
    block_tokens: int
    prompt_tokens: int


def chains_of(trace: Trace, answers: Answers) -> RequestChains:
    """Returns the requests of a trace in order of arrival."""
    tree = _Tree(trace.block_tokens, answers)
    rows = sorted(trace.rows, key=lambda row: row.timestamp_s)
    opened = [tree.add(row) for row in rows]
    chains = tuple(RequestChain(tuple(each.blocks), each.looked_up, each.length) for each in opened)
    return RequestChains(chains, tree.block_count, trace.block_tokens, sum(row.input_tokens for row in rows))


class _Tree:
    """Blocks by parent and number."""

    def __init__(self, block_tokens: int, answers: Answers) -> None:
        self._block_tokens = block_tokens
        self._answers = answers
        self._children: dict[tuple[int, int], int] = {}
        self._last_at: dict[int, _Open] = {}
        """The last request whose prompt's last full block is this one, until its answer was found."""

    @property
    def block_count(self) -> int:
        return len(self._children)

    def add(self, row: TraceRow) -> _Open:
        wanted = full_blocks(row, self._block_tokens)
        path: list[int] = []
        parent = ROOT
        for number in wanted:
            count = len(self._children)
            node = self._children.setdefault((parent, number), count)
            path.append(node)
            if node == count and parent in self._last_at:
                self._find_answer(parent, len(path) - 1, wanted, row)
            parent = node
        kept = len(wanted)
        if self._answers is not Answers.NONE:  # the last token of an answer is never computed
            kept = max(kept, (row.input_tokens + row.output_tokens - 1) // self._block_tokens)
        opened = _Open(path, len(wanted), kept)
        if self._answers in (Answers.FOUND, Answers.LOGGED) and path:
            self._last_at[path[-1]] = opened
        return opened

    def _find_answer(self, parent: int, depth: int, wanted: Iterable[int], row: TraceRow) -> None:
        """Gives the blocks that follow `parent` in a new prompt to the answer that ended in them."""
        reached = row.cached_tokens is not None and row.cached_tokens > depth * self._block_tokens
        if self._answers is Answers.LOGGED and not reached:
            return
        earlier = self._last_at.pop(parent)
        above = parent
        for number in list(wanted)[depth : earlier.length]:
            above = self._children.setdefault((above, number), len(self._children))
            earlier.blocks.append(above)
