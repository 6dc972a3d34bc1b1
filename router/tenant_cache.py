"""Bytes by key that are kept for each tenant apart, within a bound for all of them. The tenants get equal claims."""

from __future__ import annotations

import collections
import hashlib
from dataclasses import dataclass, field

ENTRY_BYTES = 200
"""Bytes of an entry besides its value: its key, and the tables that hold both."""

TENANT_BYTES = 800
"""Bytes of a tenant besides its entries: its name, and the tables that hold both."""


def tenant_digest(tenant: str) -> str:
    """Returns what a tenant is kept under: as many bytes for every name."""
    return hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class _Entries:
    values: collections.OrderedDict[bytes, bytes] = field(default_factory=collections.OrderedDict)
    """The least recently used one comes first."""
    own_bytes: int = 0
    used_at: int = 0
    """Bytes that had been put for all tenants when one of these entries was last asked for or put."""


class TenantCache:
    """Tenants are named by digests, or by other names of a bounded length.

    A tenant finds no entry of another one, and nobody's entries push out what another has below an equal claim.

    An entry that does not fit pushes out others in this order: those of a tenant that nobody has asked for while as
    much was put as fits, the tenant's own where it has more than its claim, those of the tenant that has most.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._tenants: collections.OrderedDict[str, _Entries] = collections.OrderedDict()
        """The tenant that was seen longest ago comes first."""
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
        """Keeps the value. One that is larger than all that may be kept is not."""
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
        """Drops the least recently used entry of the tenant whose turn it is when `tenant` has put one."""
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
