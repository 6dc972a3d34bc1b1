"""Hashes the blocks of prompts. It hashes a prefix only once for each tenant, while its hashes are cached."""

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
"""Blocks of a span, whose hashes are cached together. Hashes of a shorter rest are computed each time."""
HASHED_BLOCKS = 512
"""Blocks that are hashed in one iteration of the event loop, in less than a millisecond."""


class PromptHasher:
    """Caches hashes by spans of tokens.

    The key of a span covers the salt and every token up to its end, so it finds only the hashes of its own blocks.
    The cache is separate for each tenant: timing tells nobody how prompts of another tenant begin.
    """

    def __init__(self, most_bytes: int, metrics: RouterMetrics) -> None:
        """`most_bytes` bounds the cache; 0: nothing is cached."""
        self._known = TenantCache(most_bytes)
        self._keeps = most_bytes > 0
        self._secret = secrets.token_bytes(32)
        self._reused = metrics.counter(
            "reused_block_hashes", "Hashes of blocks that the router had computed for an earlier prompt."
        )

    async def hashes(self, request: GenerateRequest, block_size: int) -> tuple[BlockHash, ...]:
        """Returns the hashes of all full blocks of the prompt. Yields to other tasks from time to time."""
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
        """Appends the hashes of the full blocks after those in `hashes`."""
        block_bytes = 4 * block_size
        end = len(packed) - len(packed) % block_bytes
        for start in range(len(hashes) * block_bytes, end, HASHED_BLOCKS * block_bytes):
            if start:
                await asyncio.sleep(0)
            part = packed[start : min(end, start + HASHED_BLOCKS * block_bytes)]
            extend_packed_hashes(hashes, part, block_size, request.salt, request.public_blocks)

    def _root(self, request: GenerateRequest, block_size: int) -> bytes:
        """Returns the key of the empty prefix. It covers all that hashes depend on besides tokens."""
        content = b"%d %d " % (block_size, request.public_blocks) + request.salt
        return hashlib.blake2b(content, digest_size=HASH_BYTES, key=self._secret).digest()
