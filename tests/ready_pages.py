"""What messages announce of pages, page by page: they hold one column per fact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from twostroke.rpc.v1.worker_pb2 import PagesReady
from twostroke.transfer.base import DIGEST_BYTES


class ReadyPage(NamedTuple):
    block: int
    page: int
    generation: int
    digest: bytes
    group: int


def pages_in(messages: Iterable[PagesReady]) -> list[ReadyPage]:
    return [page for message in messages for page in _pages(message)]


def _pages(message: PagesReady) -> list[ReadyPage]:
    digests = [message.digests[at : at + DIGEST_BYTES] for at in range(0, len(message.digests), DIGEST_BYTES)]
    groups = message.groups[:] or [0] * len(message.blocks)
    rows = zip(message.blocks, message.pages, message.generations, digests, groups, strict=True)
    return [ReadyPage(*row) for row in rows]
