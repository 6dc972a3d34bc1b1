"""The seconds that a page takes from one worker to another, converted at the end where that is cheaper."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.kv_cache.form import KvForm


@dataclass(frozen=True, slots=True)
class PullEnd:
    """One of the two workers of a pull."""

    kv_form: KvForm
    page_bytes: int | None
    """Bytes of one of its pages; None while unknown."""
    conversion_page_s: float
    """Measured seconds of converting one page there; 0 where none is."""


def page_s(source: PullEnd, target: PullEnd, usual_bytes: int, bytes_per_s: float) -> float:
    """Returns the seconds of one page; workers whose page size is unknown have pages of `usual_bytes`.

    Workers choose for each pull what is cheaper then. The least of both ways is what a pull will take at most, about.
    """
    target_bytes = usual_bytes if target.page_bytes is None else target.page_bytes
    if source.kv_form == target.kv_form:
        return target_bytes / bytes_per_s
    at_source_s = source.conversion_page_s + target_bytes / bytes_per_s
    if not target.conversion_page_s or source.page_bytes is None:
        return at_source_s
    return min(at_source_s, target.conversion_page_s + source.page_bytes / bytes_per_s)
