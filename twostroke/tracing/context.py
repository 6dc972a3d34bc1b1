"""Which trace a span belongs to, and which span it is: W3C Trace Context, as the header `traceparent` carries it."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass

HEADER = "traceparent"

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_RATIO_BITS = 56
"""The bits of a trace id that decide about sampling. The standard asks them to be random."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits."""
    is_sampled: bool

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """Returns None for an invalid header: the standard asks to ignore it."""
        matched = _FORM.fullmatch(header.strip())
        if matched is None or matched[1] == "ff" or (matched[1] == "00" and matched[5]):
            return None
        trace_id, span_id = int(matched[2], 16), int(matched[3], 16)
        return cls(trace_id, span_id, bool(int(matched[4], 16) & _SAMPLED)) if trace_id and span_id else None

    @classmethod
    def begin(cls, seed: str, ratio: float) -> TraceContext:
        """Begins a trace here. Equal seeds make equal traces, whichever process begins them, and the share `ratio` of
        all seeds is sampled."""
        trace_id = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest(), "big") or 1
        is_sampled = trace_id % (1 << _RATIO_BITS) < ratio * (1 << _RATIO_BITS)
        return cls(trace_id, new_span_id(), is_sampled)

    def child(self) -> TraceContext:
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled)

    @property
    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


def header_of(context: TraceContext | None) -> str:
    return "" if context is None else context.header


def new_span_id() -> int:
    return int.from_bytes(os.urandom(8), "big") or 1
