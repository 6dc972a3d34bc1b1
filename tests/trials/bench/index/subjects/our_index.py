"""The router's own index, fed with the messages that workers send."""

from __future__ import annotations

from typing import cast

from router.routing.prefix_index import Applied, PrefixIndex
from tests.trials.bench.index.content import Stored
from twostroke import __version__
from twostroke.base.ids import BlockHash, Epoch, WorkerId
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.events import EventBatch, EventLog
from twostroke.rpc.events import batch_from_message, batch_to_message
from twostroke.rpc.v1.control_pb2 import KvEventBatch

EPOCH = Epoch(1, 1)


class OurIndex:
    version = __version__

    def __init__(self, workers: int) -> None:
        self.index = PrefixIndex()
        self.workers = [WorkerId(f"decode-{number}") for number in range(workers)]
        self._number = {worker: number for number, worker in enumerate(self.workers)}
        self._sequences, self._counts, self._xors = [0] * workers, [0] * workers, [0] * workers
        for worker in self.workers:
            assert self.index.apply(worker, EPOCH, EventLog(EPOCH).snapshot()) is Applied.APPLIED

    def message(self, stored: Stored) -> bytes:
        number = stored.worker
        self._sequences[number] += 1
        self._counts[number] += len(stored.block_hashes)
        for block_hash in stored.block_hashes:
            self._xors[number] ^= int.from_bytes(block_hash, "big")
        batch = EventBatch(
            self._sequences[number],
            tuple(BlockHash(block_hash) for block_hash in stored.block_hashes),
            (),
            self._counts[number],
            self._xors[number].to_bytes(HASH_BYTES, "big"),
        )
        return batch_to_message(self.workers[number], EPOCH, batch).SerializeToString()

    def learn(self, worker: int, message: bytes) -> None:
        batch = batch_from_message(KvEventBatch.FromString(message))
        verdict = self.index.apply(self.workers[worker], EPOCH, batch)
        assert verdict is Applied.APPLIED, verdict

    def question(self, hashes: list[bytes]) -> object:
        return [BlockHash(block_hash) for block_hash in hashes]

    def answer(self, question: object) -> object:
        return self.index.leading_blocks(cast(list[BlockHash], question))

    def depths(self, answer: object) -> dict[int, int]:
        found = cast(dict[WorkerId, tuple[int, ...]], answer)
        return {self._number[worker]: depths[-1] for worker, depths in found.items()}


def make(workers: int) -> OurIndex:
    return OurIndex(workers)
