"""What an authenticated call may do, the interface of authenticators, and the one that accepts every client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from router.auth.api_keys import MOST_PRIORITY, OperatorKey
from twostroke.base.errors import InvalidRequest

Mark = Callable[[str], str]
"""Returns a tenant's mark for a stream's name. Only routers of this cluster can make it. Empty: no tenant's."""


def unmarked(stream: str) -> str:
    return ""


def stream_marks(cluster_token: str) -> Callable[[str], Mark]:
    """Returns a function from a tenant to its `Mark`. Only routers of the cluster can make or check marks."""
    key = hashlib.blake2b(cluster_token.encode(), person=b"stream owners").digest()

    def mark(tenant: str, stream: str) -> str:
        message = f"{len(tenant)} {tenant} {stream}"
        return hashlib.blake2b(message.encode(), key=key, digest_size=8).hexdigest()

    return lambda tenant: partial(mark, tenant)


@dataclass(frozen=True, slots=True)
class AuthContext:
    """What one authenticated call may do."""

    tenant: str | None = None
    """Tenant of the API key. None: no key is needed, and a gateway may name the tenant."""
    max_priority: int = MOST_PRIORITY
    """The highest class of its requests."""
    spend: Callable[[int], None] = lambda tokens: None
    """Counts tokens of its prompts and outputs."""
    widen: Callable[[int], None] = lambda choices: None
    """Counts the choices that the call requests. Raises RateLimitExceeded or InvalidRequest for too many."""
    marks: Callable[[str], Mark] = lambda tenant: unmarked
    """Returns the `Mark` of a tenant's streams: no other tenant can resume them, or make such names."""
    is_operator: bool = False
    """Whether the call may do all that the console can."""

    def tenant_of(self, named: str, field: str) -> str:
        """Returns the tenant of the key, or else the named one. Raises InvalidRequest if these differ."""
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise InvalidRequest(f"{field}: the API key says whose request it is; leave this out", field=field)
        return self.tenant


ANONYMOUS = AuthContext()


class Authenticator(Protocol):
    takes_keys: bool
    """Whether clients need an API key."""

    def admit(self, authorization: str | None) -> AbstractContextManager[AuthContext]:
        """Authenticates a call, which lasts as long as the block. Raises InvalidApiKey or RateLimitExceeded."""

    def check(self, authorization: str | None) -> None:
        """Raises InvalidApiKey for a wrong key. Counts nothing against the limits of the key."""

    async def watch(self) -> None:
        """Follows changes of the keys until it is cancelled."""


class NoAuthentication:
    """Accepts every client. To resume a stream, its name is enough, which has random bits and a mark."""

    takes_keys = False

    def __init__(self, cluster_token: str = "") -> None:
        self._context = AuthContext(marks=stream_marks(cluster_token))
        self._operator = dataclasses.replace(self._context, is_operator=True)
        self._operator_key = OperatorKey(cluster_token)

    @contextlib.contextmanager
    def admit(self, authorization: str | None) -> Iterator[AuthContext]:
        is_operator = authorization is not None and self._operator_key.is_in(authorization)
        yield self._operator if is_operator else self._context

    def check(self, authorization: str | None) -> None:
        """Accepts every client."""

    async def watch(self) -> None:
        await asyncio.Event().wait()
