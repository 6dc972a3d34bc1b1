"""What each name may have led to, and when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

FOREVER: Final = float("inf")


@dataclass(slots=True)
class _Span:
    begin_s: float
    version: str | None
    """None: nothing."""
    end_s: float = FOREVER


@dataclass(slots=True)
class History:
    """A name leads to two versions from the moment on in which a change is asked for until it is confirmed."""

    _spans: dict[str, list[_Span]] = field(default_factory=lambda: defaultdict(list))

    def changing(self, name: str, version: str | None, now_s: float) -> None:
        """From now on a request may already get this version."""
        self._spans[name].append(_Span(now_s, version))

    def changed(self, name: str, now_s: float) -> None:
        """From now on no request gets what was before the last change."""
        for span in self._spans[name][:-1]:
            span.end_s = min(span.end_s, now_s)

    def latest(self, name: str) -> str | None:
        return self._spans[name][-1].version

    def possible(self, name: str, from_s: float, to_s: float) -> set[str | None]:
        """Returns what a request that ran from one time to another may have got."""
        return {span.version for span in self._spans[name] if span.begin_s <= to_s and span.end_s >= from_s}
