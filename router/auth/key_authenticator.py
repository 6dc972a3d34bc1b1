"""Authenticates calls by the API keys of a file, each within its limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from router.auth.api_keys import KeyEntry, KeyFile, OperatorKey, find_key, parse_keys
from router.auth.auth import AuthContext, stream_marks
from router.auth.limits import KeyLimits, OpenCall
from router.metrics import ROLE, RouterMetrics
from twostroke.base.errors import ConfigError, InvalidApiKey, RateLimitExceeded

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the key file. A revoked key is refused after at most this time."""
REASONS = ("missing", "malformed", "wrong", "revoked", "expired", "requests", "tokens", "concurrency")


def read_keys(path: str) -> KeyFile:
    """Reads the key file. Raises ConfigError with the mistake and its place."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"--api-keys {path}: {error.strerror}", field="--api-keys") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-keys {path}: it is not text", field="--api-keys") from error
    try:
        return parse_keys(text, f"--api-keys {path}")
    except ConfigError as error:
        raise ConfigError(error.message, field="--api-keys") from error


class KeyAuthenticator:
    takes_keys = True

    def __init__(self, path: str, cluster_token: str, metrics: RouterMetrics, limits: KeyLimits | None = None) -> None:
        """Reads the key file at `path`. Raises ConfigError if it cannot be used."""
        self._path = Path(path)
        self._keys = metrics.gauge("api_keys", "API keys in the file.")
        self._stale = metrics.gauge(
            "api_keys_stale", "1: the file of API keys cannot be used; those before stay in force."
        )
        self._refusals = metrics.labelled_counter("api_key_refusals", "Calls refused for their API key.", "reason")
        for reason in REASONS:
            self._refusals.labels(ROLE, reason)
        self._limits = limits or KeyLimits()
        self._marks = stream_marks(cluster_token)
        self._operator = AuthContext(marks=self._marks, is_operator=True)
        self._operator_key = OperatorKey(cluster_token)
        self._stamp = self._current_stamp()
        self._file = read_keys(str(self._path))
        self._keys.set(len(self._file.keys))

    @contextlib.contextmanager
    def admit(self, authorization: str | None) -> Iterator[AuthContext]:
        if authorization is not None and self._operator_key.is_in(authorization):
            yield self._operator
            return
        key_id, entry = self._find(authorization)
        try:
            call = self._limits.enter(key_id, entry, time.monotonic())
        except RateLimitExceeded as error:
            self._refusals.labels(ROLE, error.reason).inc()
            raise
        try:
            yield AuthContext(
                entry.tenant, entry.max_priority, call.spend, partial(self._widen, call), self._marks, entry.operator
            )
        finally:
            call.leave()

    def check(self, authorization: str | None) -> None:
        if authorization is None or not self._operator_key.is_in(authorization):
            self._find(authorization)

    def _find(self, authorization: str | None) -> tuple[str, KeyEntry]:
        try:
            return find_key(self._file.keys, authorization, time.time())
        except InvalidApiKey as error:
            self._refusals.labels(ROLE, error.reason).inc()
            raise

    def _widen(self, call: OpenCall, choices: int) -> None:
        try:
            call.widen(choices)
        except RateLimitExceeded as error:
            self._refusals.labels(ROLE, error.reason).inc()
            raise

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look_again()

    def look_again(self) -> None:
        """Reads the key file again if it has changed. If it cannot be used, the former keys stay valid."""
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._file = read_keys(str(self._path))
        except ConfigError as error:
            self._stale.set(1)
            log.error("API keys not read again, those before stay in force error=%s", error.message)
            return
        self._stale.set(0)
        self._keys.set(len(self._file.keys))
        log.info("API keys read again file=%s keys=%d", self._path, len(self._file.keys))

    def _current_stamp(self) -> tuple[int, int, int] | None:
        """Returns a stamp that changes with the file, or with the link that leads to it, as in mounted Secrets."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
