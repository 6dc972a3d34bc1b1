"""Cache hand-off: a worker that drains lets others of its role fetch its cached blocks, most recently used first.

Chains that begin with the same block go to the same successor. A successor gets at most half of its pages that no pin
keeps, or its free pages if those are more. Its own blocks are worth as much as the new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc.aio

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.groups.full_group import CachedBlock
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of
from twostroke.rpc.convert import hashes_to_bytes
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.worker.host import WorkerHost

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Seconds within which a live successor answers."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks that follow one another."""

    root: BlockHash
    """Parent of the first block."""
    block_hashes: tuple[BlockHash, ...]
    fresh: int
    """Number of blocks of this chain that no earlier chain has."""

    def cut(self, fresh: int) -> Chain:
        """Returns the chain without its last blocks, so that at most `fresh` are fresh."""
        return self if fresh >= self.fresh else Chain(self.root, self.block_hashes[: fresh - self.fresh], fresh)


@dataclass(slots=True)
class SuccessorChains:
    """The chains that one successor gets."""

    successor: control_pb2.Successor
    room: int
    """Pages that it may still be given."""
    chains: list[Chain] = field(default_factory=list)


async def hand_off_cache(host: WorkerHost, successors: Sequence[control_pb2.Successor], until_s: float) -> int:
    """Lets successors fetch blocks until `until_s` on the event loop's clock; returns how many they got."""
    rooms = await asyncio.gather(*(_room(host, successor) for successor in successors))
    assigned = [SuccessorChains(successor, room) for successor, room in zip(successors, rooms, strict=True)]
    cached = host.pool.cached()
    # Not on the event loop: it takes a second if thousands of prompts share a prefix.
    await asyncio.to_thread(lambda: divide(hottest_chains(cached), assigned))
    blocks = sum(await asyncio.gather(*(_give(host, given, until_s) for given in assigned)))
    log.info("cache handed off successors=%d blocks=%d", len(successors), blocks)
    return blocks


def divide(chains: Iterable[Chain], assigned: Sequence[SuccessorChains]) -> None:
    """Gives each chain to the successor that has its first block, else to the one with most room."""
    taken: dict[BlockHash, SuccessorChains] = {}
    for chain in chains:
        given = taken.get(chain.block_hashes[0]) or max(assigned, key=lambda each: each.room)
        if given.room > 0:
            taken[chain.block_hashes[0]] = given
            given.chains.append(chain.cut(given.room))
            given.room -= chain.fresh


def pages_to_give(load: control_pb2.Load) -> int:
    """Returns how many pages a successor with this load may be given: a fetch never takes those that a pin keeps."""
    return max(load.pages_free, (load.pages_total - load.pages_pinned) // 2)


async def _room(host: WorkerHost, successor: control_pb2.Successor) -> int:
    """Returns how many pages a successor may be given; 0 if it does not answer."""
    peer = PeerChannel(successor.address, host.us)
    try:
        answer = await control_pb2_grpc.ControlStub(peer.channel).GetLoad(
            control_pb2.GetLoadRequest(), metadata=peer.metadata, timeout=ANSWER_S
        )
    except grpc.aio.AioRpcError as error:
        log.warning(
            "successor not reached successor=%s error=%s", successor.worker_id, error_of(error, successor.address)
        )
        return 0
    finally:
        await peer.close()
    return pages_to_give(answer.workers[0].load)


async def _give(host: WorkerHost, given: SuccessorChains, until_s: float) -> int:
    successor, blocks, loop = given.successor, 0, asyncio.get_running_loop()
    own = worker_pb2.PageSource(worker_id=host.config.worker_id, address=host.address, epoch=str(host.epoch))
    peer = PeerChannel(successor.address, host.us)
    try:
        for chain in given.chains:
            within_s = until_s - loop.time()
            if within_s <= 0:
                break
            request = worker_pb2.FetchRequest(
                fingerprint=host.facts.fingerprint,
                worker_epoch=successor.epoch,
                source=own,
                block_hashes=hashes_to_bytes(chain.block_hashes),
                root=chain.root,
                within_s=within_s,
            )
            answer = await worker_pb2_grpc.PagesStub(peer.channel).Fetch(
                request, metadata=peer.metadata, timeout=call_timeout_s(within_s + ANSWER_S)
            )
            blocks += min(answer.blocks, chain.fresh)
            if answer.blocks < len(chain.block_hashes):
                break
    except grpc.aio.AioRpcError as error:
        log.warning("successor lost successor=%s error=%s", successor.worker_id, error_of(error, successor.address))
    finally:
        await peer.close()
    return blocks


def hottest_chains(cached: Iterable[CachedBlock]) -> Iterator[Chain]:
    """Yields all cached blocks in chains of maximal length, the most recently used first."""
    by_hash = {block.hash: block for block in cached}
    parents = {block.parent for block in by_hash.values()}
    last_ones = [block for block in by_hash.values() if block.hash not in parents]
    seen_before: set[BlockHash] = set()
    for last in sorted(last_ones, key=lambda block: -block.last_used):
        chain, seen = [last], {last.hash}
        # Parents come from other workers, so there may be a cycle.
        while (parent := by_hash.get(chain[-1].parent)) is not None and parent.hash not in seen:
            chain.append(parent)
            seen.add(parent.hash)
        hashes = tuple(block.hash for block in reversed(chain))
        yield Chain(chain[-1].parent, hashes, sum(block_hash not in seen_before for block_hash in hashes))
        seen_before.update(hashes)
