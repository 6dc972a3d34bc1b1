"""The radix tree of NVIDIA Dynamo's router (package ai-dynamo-runtime), through its Python binding.

It hashes a block twice, by its own tokens and by all tokens up to it, in 64 bits each: the two halves of our hashes.
"""

from __future__ import annotations

import json
from importlib import import_module, metadata
from typing import Any, cast

from tests.trials.bench.index.content import Stored


class DynamoTree:
    version = metadata.version("ai-dynamo-runtime")

    def __init__(self) -> None:
        self._tree: Any = import_module("dynamo._core").RadixTree()
        self._events = 0

    def message(self, stored: Stored) -> bytes:
        self._events += 1
        blocks = [
            {"block_hash": _of_prefix(block_hash), "tokens_hash": _of_tokens(block_hash)}
            for block_hash in stored.block_hashes
        ]
        parent = None if stored.parent is None else _of_prefix(stored.parent)
        event = {"event_id": self._events, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0}
        return json.dumps(event).encode()

    def learn(self, worker: int, message: bytes) -> None:
        self._tree.apply_event(worker, message)

    def question(self, hashes: list[bytes]) -> object:
        return [_of_tokens(block_hash) for block_hash in hashes]

    def answer(self, question: object) -> object:
        return self._tree.find_matches(question).scores

    def depths(self, answer: object) -> dict[int, int]:
        return {worker: depth for (worker, _), depth in cast(dict[tuple[int, int], int], answer).items()}


def make(workers: int) -> DynamoTree:
    del workers
    return DynamoTree()


def _of_prefix(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big")


def _of_tokens(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[8:], "big")
