"""Hit rates by capacity against slow oracles: the workers' own pool, and the optimum found block by block."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import numpy as np
import pytest

from tools.bill.requests.capacity import Optimum, capacities, distinct_blocks, least_recently_used
from tools.bill.requests.chains import Answers, RequestChains, chains_of
from tools.simulate.traces.formats import OWN_NUMBERS, TraceRow
from tools.simulate.traces.trace import Trace
from twostroke.base.ids import BlockHash, PageId
from twostroke.kv_cache.pool import BlockPool

BLOCK = 4
ROOT = BlockHash(b"root")


class Silent:
    """A listener that wants to know nothing."""

    def stored(self, block_hashes: Sequence[BlockHash]) -> None: ...

    def removed(self, block_hashes: Sequence[BlockHash]) -> None: ...

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None: ...

    def forgotten(self, block_hash: BlockHash) -> None: ...

    def new_writers(self, pages: Sequence[PageId]) -> None: ...


def random_trace(seed: int, requests: int = 100, *, goes_on: float = 0.5) -> Trace:
    """Chats that go on from earlier ones, from one of few beginnings, or branch off in the middle."""
    draws = random.Random(seed)
    numbers = iter(range(1, 1 << 30))
    chats: list[tuple[list[int], int]] = [([next(numbers) for _ in range(draws.randrange(1, 6))], 0) for _ in range(3)]
    rows = []
    for at in range(requests):
        blocks, answer = draws.choice(chats[-12:]) if draws.random() < goes_on else draws.choice(chats[:3])
        cut = len(blocks) if draws.random() < 0.8 else draws.randrange(len(blocks) + 1)
        path = blocks[:cut] + [next(numbers) for _ in range(answer // BLOCK + draws.randrange(1, 5))]
        tail, output = draws.randrange(BLOCK), draws.randrange(1, 20)
        named = (*path, *([OWN_NUMBERS + at] if tail else []))
        rows.append(TraceRow(float(at), BLOCK * len(path) + tail, output, named))
        chats.append((path, output))
    return Trace("random", BLOCK, tuple(rows))


def hits_of_pool(requests: RequestChains, capacity: int) -> int:
    """Lets a worker's pool claim, fill and release the blocks of every request in turn."""
    pool = BlockPool(capacity, Silent())
    found, unique = 0, 0
    for chain in requests.chains:
        hashes = [BlockHash(f"{block}".encode()) for block in chain.blocks]
        for _ in range(chain.length - len(chain.blocks)):
            unique += 1
            hashes.append(BlockHash(f"answer {unique}".encode()))
        found += min(pool.hits(hashes), chain.looked_up)
        claim = pool.claim(hashes, ROOT, 0)
        assert claim is not None
        for index in claim.missing:
            pool.fill(claim.pages[index])
        pool.release(claim.pages)
    pool.check_integrity()
    return found


class Farthest:
    """Forgets the block that is used again last, or never, and of equal ones the deepest."""

    def __init__(self, requests: RequestChains) -> None:
        self._requests = requests

    def hits(self, capacity: int) -> int:
        uses = [chain.blocks for chain in self._requests.chains]
        next_uses = self._next_uses(uses)
        held: dict[int, tuple[int, int]] = {}
        found = 0
        for chain, nexts in zip(self._requests.chains, next_uses, strict=True):
            for block in chain.blocks[: chain.looked_up]:
                if block not in held:
                    break
                found += 1
            for depth, (block, next_use) in enumerate(zip(chain.blocks, nexts, strict=True)):
                held[block] = (next_use, depth)
            for block in heapq.nlargest(max(0, len(held) - capacity), held, key=lambda each: held[each]):
                del held[block]
        return found

    @staticmethod
    def _next_uses(uses: Sequence[Sequence[int]]) -> list[list[int]]:
        later: dict[int, int] = {}
        found = []
        for at in reversed(range(len(uses))):
            found.append([later.get(block, len(uses)) for block in uses[at]])
            later.update(dict.fromkeys(uses[at], at))
        return found[::-1]


@pytest.mark.parametrize("answers", [Answers.NONE, Answers.KEPT, Answers.FOUND])
@pytest.mark.parametrize("seed", range(4))
def test_hits_at_every_capacity_are_those_of_a_worker_s_pool(answers: Answers, seed: int) -> None:
    requests = chains_of(random_trace(seed), answers)
    curve = least_recently_used(requests)
    longest = max(chain.length for chain in requests.chains)
    for capacity in range(longest, distinct_blocks(requests.chains) + 20, 11):
        assert curve.at(capacity) == hits_of_pool(requests, capacity), capacity
    enough = int(np.searchsorted(curve.by_blocks, curve.most))
    assert curve.at(10**9) == curve.most == curve.at(enough)
    assert curve.at(enough - 1) < curve.most


@pytest.mark.parametrize("answers", [Answers.NONE, Answers.KEPT, Answers.FOUND])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_what_block_by_block_is_found_and_never_below_least_recent(answers: Answers, seed: int) -> None:
    requests = chains_of(random_trace(seed), answers)
    optimum, slow, curve = Optimum(requests), Farthest(requests), least_recently_used(requests)
    for capacity in (*capacities(requests, 12), 3, 17, 40):
        assert curve.at(capacity) <= optimum.hits(capacity) == slow.hits(capacity)
    assert optimum.hits(10**9) == curve.most


def test_capacities_reach_from_one_block_to_all_of_them() -> None:
    requests = chains_of(random_trace(3), Answers.KEPT)
    found = capacities(requests, 16)
    assert (found[0], found[-1]) == (1, distinct_blocks(requests.chains))
    assert list(found) == sorted(set(found))


def rows(*said: tuple[int, int, tuple[int, ...], int | None]) -> Trace:
    listed = [TraceRow(float(at), *each[:3], cached_tokens=each[3]) for at, each in enumerate(said)]
    return Trace("by hand", BLOCK, tuple(listed))


def test_a_prompt_that_goes_on_from_an_answer_finds_its_blocks() -> None:
    """Two blocks of prompt and nine tokens of answer: blocks 3 and 4 hold them, block 5 is new."""
    trace = rows((8, 9, (1, 2), 0), (20, 1, (1, 2, 3, 4, 5), 16))
    for answers, hits in ((Answers.NONE, 2), (Answers.KEPT, 2), (Answers.FOUND, 4), (Answers.LOGGED, 4)):
        assert least_recently_used(chains_of(trace, answers)).most == hits, answers


def test_an_answer_is_found_by_the_log_only_where_cached_tokens_reached_into_it() -> None:
    trace = rows((8, 9, (1, 2), 0), (20, 1, (1, 2, 3, 4, 5), 8), (20, 1, (1, 2, 6, 7, 8), None))
    assert least_recently_used(chains_of(trace, Answers.LOGGED)).most == 2 + 2


def test_equal_numbers_behind_other_parents_are_other_blocks() -> None:
    trace = rows((8, 1, (1, 9), None), (8, 1, (2, 9), None), (8, 1, (2, 9), None))
    assert least_recently_used(chains_of(trace, Answers.NONE)).most == 2


def test_requests_count_in_the_order_in_which_they_came() -> None:
    trace = rows((4, 1, (1,), None), (4, 1, (2,), None), (4, 1, (1,), None))
    swapped = Trace("by hand", BLOCK, (trace.rows[2], trace.rows[0], trace.rows[1]))
    assert chains_of(swapped, Answers.NONE) == chains_of(trace, Answers.NONE)
