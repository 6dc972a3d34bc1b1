"""A record is one page in a segment file: a header that says which page it is, then the page's bytes.

All records of a format have one size, a multiple of the sector size. So direct I/O works, and the header of the next
record is found without reading this one. The header has a digest of its own. A record with an intact header and damaged
bytes is detected when it is read.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from twostroke.base.ids import BlockHash

SECTOR: Final = 4096
"""Bytes to which direct I/O aligns offsets, lengths and memory on every usual disk."""
VERSION: Final = 1
"""Version of the records; a record of another version is never used."""
IDENTITY_BYTES: Final = 16
"""Bytes of an identity: 128 bits of BLAKE2b over the fingerprint and the form."""
DIGEST_BYTES: Final = 8
MOST_SEGMENT_BYTES: Final = 256 << 20
"""Size of the largest segment; a record that is larger has a segment of its own."""

_MAGIC = b"2STRKPG\n"
_HEADER = struct.Struct("<8sI4x16s16s16sQ8s")
"""Magic, version, block hash, parent hash, identity, page bytes, page digest; then the header's own digest."""
HEADER_BYTES: Final = _HEADER.size + DIGEST_BYTES


def record_bytes(page_bytes: int) -> int:
    """Returns the size of a record of one page on disk: header and page, rounded up to whole sectors."""
    return -(-(HEADER_BYTES + page_bytes) // SECTOR) * SECTOR


def identity_of(fingerprint: str, form: str) -> bytes:
    """Returns 128 bits that two workers share exactly if their pages have the same fingerprint and form."""
    parts = [part.encode() for part in (fingerprint, form)]
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.blake2b(framed, digest_size=IDENTITY_BYTES, person=b"twostroke.disk").digest()


@dataclass(frozen=True, slots=True)
class RecordHeader:
    block_hash: BlockHash
    parent: BlockHash
    page_digest: bytes


DEAD: Final = RecordHeader(BlockHash(bytes(16)), BlockHash(bytes(16)), bytes(DIGEST_BYTES))
"""The header of a record that is not to be used. No block has that hash; records after it are still found."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The shape of all records of one folder."""

    identity: bytes
    """What `identity_of` returned for the pages."""
    page_bytes: int

    @property
    def record_bytes(self) -> int:
        """Size of a record: header and page, rounded up to whole sectors."""
        return record_bytes(self.page_bytes)

    def pack(self, header: RecordHeader) -> bytes:
        """Returns the header's bytes."""
        packed = _HEADER.pack(
            _MAGIC,
            VERSION,
            header.block_hash,
            header.parent,
            self.identity,
            self.page_bytes,
            header.page_digest,
        )
        return packed + xxhash.xxh3_64_digest(packed)

    def parse(self, data: bytes | memoryview) -> RecordHeader | None:
        """Returns the header at the start of `data`. None if that is not a header of this format, or a damaged one."""
        packed = bytes(data[: _HEADER.size])
        if len(packed) < _HEADER.size or xxhash.xxh3_64_digest(packed) != bytes(data[_HEADER.size : HEADER_BYTES]):
            return None
        magic, version, block_hash, parent, identity, page_bytes, page_digest = _HEADER.unpack(packed)
        if (magic, version, identity, page_bytes) != (_MAGIC, VERSION, self.identity, self.page_bytes):
            return None
        return RecordHeader(BlockHash(block_hash), BlockHash(parent), page_digest)

    def page_of(self, record: memoryview) -> memoryview:
        """Returns the page's bytes within a record's."""
        return record[HEADER_BYTES : HEADER_BYTES + self.page_bytes]
