"""Hashes the blocks of prompts. A prefix that a tenant repeats is hashed only once."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

from router.metrics import RouterMetrics
from router.tenant_cache import TenantCache, tenant_digest
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.block import HASH_BYTES, extend_packed_hashes, packed_tokens
from twostroke.request import GenerateRequest

SPAN_BLOCKS = 64
"""Blocks whose hashes are kept together: those of a shorter rest are computed anew."""
HASHED_BLOCKS = 512
"""Blocks that are hashed in one turn of the event loop, which takes less than a millisecond."""


class PromptHasher:
    """Keeps hashes by spans of tokens.

    The key of a span covers the salt and every token up to its end. So a hash is found again only by prompts whose
    blocks have that very hash, and nobody learns from the time it takes what another tenant's prompts begin with.
    """

    def __init__(self, most_bytes: int, metrics: RouterMetrics) -> None:
        """`most_bytes`: bytes of hashes that are kept; 0: none."""
        self._known = TenantCache(most_bytes)
        self._keeps = most_bytes > 0
        self._secret = secrets.token_bytes(32)
        self._reused = metrics.counter(
            "reused_block_hashes", "Hashes of blocks that the router had computed for an earlier prompt."
        )

    async def hashes(self, request: GenerateRequest, block_size: int) -> tuple[BlockHash, ...]:
        """Returns the hashes of all full blocks of the prompt. Other requests are served between its parts."""
        packed = memoryview(packed_tokens(request.prompt))
        span_bytes = 4 * block_size * SPAN_BLOCKS
        spans = len(packed) // span_bytes if self._keeps else 0
        hashes: list[BlockHash] = []
        reused, done = 0, 0
        key, tenant = self._root(request, block_size), tenant_digest(request.hint_tenant)
        for start in range(0, spans * span_bytes, span_bytes):
            span = packed[start : start + span_bytes]
            key = hashlib.blake2b(span, digest_size=HASH_BYTES, key=key).digest()
            known = self._known.get(tenant, key)
            done += SPAN_BLOCKS
            if done % HASHED_BLOCKS == 0:
                await asyncio.sleep(0)
            if known is not None:
                reused += SPAN_BLOCKS
                hashes += (BlockHash(known[start : start + HASH_BYTES]) for start in range(0, len(known), HASH_BYTES))
                continue
            extend_packed_hashes(hashes, span, block_size, request.salt, request.public_blocks)
            self._known.put(tenant, key, b"".join(hashes[-SPAN_BLOCKS:]))
        self._reused.inc(reused)
        await self._rest(hashes, packed, request, block_size)
        return tuple(hashes)

    async def _rest(
        self, hashes: list[BlockHash], packed: memoryview, request: GenerateRequest, block_size: int
    ) -> None:
        """Appends the hashes of the blocks after those of `hashes`."""
        block_bytes = 4 * block_size
        end = len(packed) - len(packed) % block_bytes
        for start in range(len(hashes) * block_bytes, end, HASHED_BLOCKS * block_bytes):
            if start:
                await asyncio.sleep(0)
            part = packed[start : min(end, start + HASHED_BLOCKS * block_bytes)]
            extend_packed_hashes(hashes, part, block_size, request.salt, request.public_blocks)

    def _root(self, request: GenerateRequest, block_size: int) -> bytes:
        """Returns the key before the first span: of all that its hashes depend on besides tokens."""
        content = b"%d %d " % (block_size, request.public_blocks) + request.salt
        return hashlib.blake2b(content, digest_size=HASH_BYTES, key=self._secret).digest()
