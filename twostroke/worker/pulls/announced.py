"""Pages that a source announces together: the columns of `PagesReady`, as it writes and as its puller reads them."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from twostroke.base.errors import TransferFailed
from twostroke.base.ids import PageId
from twostroke.kv_cache.parts import GroupKind, Part, parts_from
from twostroke.rpc.v1 import worker_pb2
from twostroke.transfer.base import DIGEST_BYTES

_GROUPS = tuple(GroupKind)


@dataclass(frozen=True, slots=True)
class AnnouncedPages:
    """Pages of one group, by their columns."""

    parts: Sequence[Part]
    remote: Sequence[int]
    """Pages of the source."""
    generations: Sequence[int]
    digests: Sequence[bytes]

    def of(self, first: int, end: int) -> AnnouncedPages:
        """Returns the pages from index `first` up to `end`."""
        return AnnouncedPages(
            self.parts[first:end], self.remote[first:end], self.generations[first:end], self.digests[first:end]
        )

    def where(self, is_taken: Sequence[bool]) -> AnnouncedPages:
        """Returns the pages for which `is_taken` is true."""
        return AnnouncedPages(
            list(itertools.compress(self.parts, is_taken)),
            list(itertools.compress(self.remote, is_taken)),
            list(itertools.compress(self.generations, is_taken)),
            list(itertools.compress(self.digests, is_taken)),
        )


def announcement(ready: Mapping[Part, PageId], known: Sequence[tuple[int, bytes]]) -> worker_pb2.PagesReady:
    """Returns the message of these pages, whose generations and digests are known."""
    blocks, groups = zip(*ready, strict=True)
    generations, digests = zip(*known, strict=True)
    return worker_pb2.PagesReady(
        blocks=blocks,
        pages=ready.values(),
        generations=generations,
        digests=b"".join(digests),
        groups=groups if any(groups) else (),
    )


def announced_pages(ready: worker_pb2.PagesReady, remaining: Container[Part], source: str) -> list[AnnouncedPages]:
    """Returns the announced pages that have not come yet, by group. Pages of groups that are not known are left out.

    Raises TransferFailed where the columns do not fit together, or name a page twice.
    """
    blocks, remote, generations, packed = ready.blocks[:], ready.pages[:], ready.generations[:], ready.digests
    groups: Sequence[int] = ready.groups[:] or [GroupKind.FULL] * len(blocks)
    if len({len(blocks), len(remote), len(generations), len(groups), len(packed) / DIGEST_BYTES}) > 1:
        raise TransferFailed(f"{source} announced pages in columns of different lengths")
    if len(set(zip(blocks, groups, strict=True))) < len(blocks):
        raise TransferFailed(f"{source} announced a page twice")
    digests = [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
    found = []
    for group in _GROUPS[: 1 + max(groups, default=0)]:
        parts = parts_from(blocks, itertools.repeat(group))
        is_new = [part in remaining and number == group for part, number in zip(parts, groups, strict=True)]
        if all(is_new):
            return [AnnouncedPages(parts, remote, generations, digests)]
        if any(is_new):
            found.append(AnnouncedPages(parts, remote, generations, digests).where(is_new))
    return found
