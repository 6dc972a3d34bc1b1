"""The router's cache of tokens of earlier texts, for the processes that prepare requests.

The cache is in the router, not in these processes. So a process sees only the cached texts of its request's tenant, and
nothing is lost when it ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from array import array
from collections.abc import Sequence

from router.metrics import RouterMetrics
from router.preparation.wire import BrokenMessage
from router.requests.work import PreparationOutcome, SegmentQuery, Segments, Work
from router.tenant_cache import TenantCache, tenant_digest
from router.text.known_text import KEY_BYTES

TOKEN_BYTES = 4


class TenantTexts:
    """The cached texts of one tenant, for one request."""

    def __init__(self, texts: PreparedTexts, tenant: str) -> None:
        self._texts = texts
        self._tenant = tenant_digest(tenant)
        self._found: list[bytes] = []
        """Keys that this request has found or kept, in the order of the segments of its texts."""

    def find(self, keys: Sequence[bytes]) -> Sequence[array[int]]:
        """Returns the tokens of the first keys, up to the first one that is not known."""
        return [array("I", each) for each in self._values(keys)]

    def keep(self, key: bytes, tokens: array[int]) -> None:
        self._texts.cache.put(self._tenant, key, tokens.tobytes())
        self._found.append(key)
        self._texts.count_kept()

    def answer(self, query: SegmentQuery) -> Segments:
        """Returns the tokens of a query's first keys. Raises BrokenMessage for a malformed query."""
        found = self._values(_split(query.keys))
        return Segments(b"", tuple(len(each) // TOKEN_BYTES for each in found), b"".join(found))

    def learn(self, outcome: PreparationOutcome) -> None:
        """Keeps the segments that a process has tokenized. Raises BrokenMessage if they are malformed.

        A segment is found only after those before it were found. So the last ones are put in first, and evicted first.
        """
        learned, outcome.learned = outcome.learned, None
        if learned is not None:
            self._keep_all(learned)
        for key in reversed(self._found):
            self._texts.cache.get(self._tenant, key)

    def _keep_all(self, learned: Segments) -> None:
        keys, at = _split(learned.keys), 0
        if len(keys) != len(learned.counts) or sum(learned.counts) * TOKEN_BYTES != len(learned.tokens):
            raise BrokenMessage("its segments are not as many as their keys, or as long as their tokens")
        found = []
        for key, count in zip(keys, learned.counts, strict=True):
            end = at + count * TOKEN_BYTES
            found.append((key, learned.tokens[at:end]))
            at = end
        for key, tokens in reversed(found):
            self._texts.cache.put(self._tenant, key, tokens)
        self._texts.count_kept()

    def _values(self, keys: Sequence[bytes]) -> list[bytes]:
        found = []
        for key in keys:
            value = self._texts.cache.get(self._tenant, key)
            if value is None:
                break
            found.append(value)
        self._found += keys[: len(found)]
        self._texts.count_found(sum(map(len, found)) // TOKEN_BYTES)
        return found


class PreparedTexts:
    def __init__(self, most_bytes: int, metrics: RouterMetrics) -> None:
        """`most_bytes` bounds the cache; 0: nothing is cached."""
        self.cache = TenantCache(most_bytes)
        self._keeps = most_bytes > 0
        self._secret = secrets.token_bytes(32)
        self._hits = metrics.counter("text_cache_hits", "Long texts with a prefix that was tokenized before.")
        self._misses = metrics.counter("text_cache_misses", "Long texts without a prefix that was tokenized before.")
        self._tokens = metrics.counter("text_cache_tokens", "Tokens of prompts that were not tokenized again.")
        self._bytes = metrics.gauge("text_cache_bytes", "Bytes of tokens that the router keeps of earlier texts.")

    def known_to(self, work: Work) -> TenantTexts | None:
        return None if work.tenant is None or not self._keeps else TenantTexts(self, work.tenant)

    def keyed(self, work: Work) -> Work:
        """Returns the work with `text_key`, the key of its tenant's texts, if there is a cache and a tenant."""
        if work.tenant is None or not self._keeps:
            return work
        key = hashlib.blake2b(work.tenant.encode(), digest_size=32, key=self._secret).digest()
        return dataclasses.replace(work, text_key=key)

    def count_found(self, tokens: int) -> None:
        (self._hits if tokens else self._misses).inc()
        self._tokens.inc(tokens)

    def count_kept(self) -> None:
        self._bytes.set(self.cache.total_bytes)


def _split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise BrokenMessage(f"keys have {KEY_BYTES} bytes each")
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
