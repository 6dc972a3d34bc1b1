"""A cache of byte strings, separate for each tenant. One bound holds for all, and tenants have equal claims to it."""

from __future__ import annotations

import collections
import hashlib
from dataclasses import dataclass, field

ENTRY_BYTES = 200
"""Bytes that count for an entry besides its value: its key, and the tables that hold both."""

TENANT_BYTES = 800
"""Bytes that count for a tenant besides its entries: its name, and the tables that hold both."""


def tenant_digest(tenant: str) -> str:
    """Returns the tenant's key in caches. It has the same length for all names."""
    return hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class _Entries:
    values: collections.OrderedDict[bytes, bytes] = field(default_factory=collections.OrderedDict)
    """Values by key, the least recently used one first."""
    own_bytes: int = 0
    used_at: int = 0
    """Bytes that had ever been put for all tenants when one of these entries was last found or put."""


class TenantCache:
    """Keeps values by tenant and key. A tenant is given by its digest, or another name of a bounded length.

    A tenant finds only its own entries. Tenants do not lose entries to others while they have less than an equal
    claim to all bytes and use them.

    An entry that does not fit evicts others in this order: those of the tenant that was used longest ago, if as many
    bytes were put since as fit in all; the tenant's own, if it has more than its claim; those of the largest tenant.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._tenants: collections.OrderedDict[str, _Entries] = collections.OrderedDict()
        """Entries by tenant, the one that was used longest ago first."""
        self._put_bytes = 0
        self.total_bytes = 0

    def get(self, tenant: str, key: bytes) -> bytes | None:
        entries = self._tenants.get(tenant)
        value = None if entries is None else entries.values.get(key)
        if entries is None or value is None:
            return None
        entries.values.move_to_end(key)
        self._seen(tenant, entries)
        return value

    def put(self, tenant: str, key: bytes, value: bytes) -> None:
        """Keeps the value, unless it is larger than the whole cache."""
        size = len(value) + ENTRY_BYTES
        if size + TENANT_BYTES > self._most_bytes:
            return
        entries = self._tenants.get(tenant)
        if entries is None:
            entries = self._tenants[tenant] = _Entries()
            self._add(entries, TENANT_BYTES)
        self._seen(tenant, entries)
        before = entries.values.pop(key, None)
        if before is not None:
            self._add(entries, -len(before) - ENTRY_BYTES)
        entries.values[key] = value
        self._put_bytes += size
        self._add(entries, size)
        while self.total_bytes > self._most_bytes:
            self._drop_one(tenant)

    def _seen(self, tenant: str, entries: _Entries) -> None:
        entries.used_at = self._put_bytes
        self._tenants.move_to_end(tenant)

    def _add(self, entries: _Entries, size: int) -> None:
        entries.own_bytes += size
        self.total_bytes += size

    def _drop_one(self, tenant: str) -> None:
        """Drops the least recently used entry of the tenant that has to lose one after `tenant` has put one."""
        chosen = next(iter(self._tenants))
        if self._put_bytes - self._tenants[chosen].used_at <= self._most_bytes:
            claim = self._most_bytes / len(self._tenants)
            chosen = tenant
            if self._tenants[tenant].own_bytes <= claim:
                chosen = max(self._tenants, key=lambda each: self._tenants[each].own_bytes)
        entries = self._tenants[chosen]
        _, value = entries.values.popitem(last=False)
        self._add(entries, -len(value) - ENTRY_BYTES)
        if not entries.values:
            del self._tenants[chosen]
            self.total_bytes -= TENANT_BYTES
