"""What an authenticated call may do, and who authenticates calls. Here every client is accepted."""

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
"""Makes a tenant's mark of a stream's name, which only routers of this cluster can. Empty: it is not a tenant's."""


def unmarked(stream: str) -> str:
    return ""


def stream_marks(cluster_token: str) -> Callable[[str], Mark]:
    """Returns what makes a tenant's marks. Only routers of the cluster can make them, and each can check them."""
    key = hashlib.blake2b(cluster_token.encode(), person=b"stream owners").digest()

    def mark(tenant: str, stream: str) -> str:
        message = f"{len(tenant)} {tenant} {stream}"
        return hashlib.blake2b(message.encode(), key=key, digest_size=8).hexdigest()

    return lambda tenant: partial(mark, tenant)


@dataclass(frozen=True, slots=True)
class AuthContext:
    """What one authenticated call may do."""

    tenant: str | None = None
    """Tenant of the API key. None: no key was asked for, and the gateway names the tenant."""
    max_priority: int = MOST_PRIORITY
    """The highest class that its requests may have."""
    spend: Callable[[int], None] = lambda tokens: None
    """Counts tokens of its prompts and outputs."""
    widen: Callable[[int], None] = lambda choices: None
    """Tells how many choices the call asks for. Raises RateLimitExceeded or InvalidRequest for too many."""
    marks: Callable[[str], Mark] = lambda tenant: unmarked
    """Marks a stream's name as a tenant's: no other tenant can resume it, or make such a name."""
    is_operator: bool = False
    """Whether it may see and do what the console can."""

    def tenant_of(self, named: str, field: str) -> str:
        """Returns the tenant. Raises InvalidRequest where the key names another than the client, or its gateway,
        said."""
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise InvalidRequest(f"{field}: the API key says whose request it is; leave this out", field=field)
        return self.tenant


ANONYMOUS = AuthContext()


class Authenticator(Protocol):
    takes_keys: bool
    """Whether clients show an API key."""

    def admit(self, authorization: str | None) -> AbstractContextManager[AuthContext]:
        """Lets one call in for as long as it takes. Raises InvalidApiKey or RateLimitExceeded."""

    def check(self, authorization: str | None) -> None:
        """Raises InvalidApiKey. Nothing is counted for the key."""

    async def watch(self) -> None:
        """Keeps up with changes of the keys, until it is cancelled."""


class NoAuthentication:
    """Accepts every client. A stream's name, which has random bits and a mark, is enough to resume it."""

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
