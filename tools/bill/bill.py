"""The whole bill, as one value: what is shown in the terminal, in a page and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from tools.bill.branches import PARTS
from tools.bill.forms import FormBill, MixedBill, form_bills, mixed_bills
from tools.bill.measure import MachineCosts, break_even_pages, known_bandwidth, measured
from tools.bill.model import BilledModel, billed_model
from tools.bill.options import BillFlags
from tools.bill.parts import BilledPart
from tools.bill.requests.log import LogBill, read_log
from twostroke.base.errors import ConfigError
from twostroke.kv_cache.memory import available_memory_bytes
from twostroke.kv_cache.pool_size import refuse_more_than_free

SURE: Final = 2.33
"""Standard deviations with which the requests of a log fit in 99 of 100 draws."""


@dataclass(frozen=True, slots=True)
class Bill:
    flags: BillFlags
    model: BilledModel
    forms: dict[str, FormBill]
    lengths: tuple[int, ...]
    """Tokens of the requests that are billed."""
    log: LogBill | None
    bytes_per_s: float | None
    """Memory that a step reads; None while unknown."""
    measured: MachineCosts | None
    mixed: tuple[MixedBill, ...]
    """For decode workers of other forms."""
    free_bytes: int
    """What this machine has free."""
    parts: tuple[BilledPart, ...] = ()
    """What features add to the bill."""

    @property
    def chosen(self) -> FormBill:
        """The bill of the form that is asked for."""
        return self.forms[self.flags.form]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return self.model.plan.longest

    @property
    def on_gpu(self) -> bool:
        return self.flags.memory.device_memory_bytes is not None

    @property
    def total_bytes(self) -> int:
        """What one worker takes on a CPU."""
        pages = self.chosen.pool_bytes + self.chosen.host_tier_bytes
        plan, further = self.model.plan, sum(part.total_bytes for part in self.parts)
        return plan.weights.total + plan.working_bytes + pages + further

    def capacity_tokens(self, form: FormBill, tier: int) -> int:
        """Returns how many tokens all tiers up to this one hold: 0 for the pool, 1 with the host, 2 with the disk."""
        pages = (form.size.pages, form.host_pages, form.disk_pages)[: tier + 1]
        return sum(pages) * form.size.block_size

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that hold pages, nearest first."""
        sizes = (("host", self.chosen.host_pages), ("disk", self.chosen.disk_pages))
        return ("device", *(name for name, pages in sizes if pages))

    def advice(self) -> tuple[str, ...]:
        """Says what would be refused or not be served at the start of a worker, and what to change."""
        advice = [self.chosen.size.advice(self.longest)]
        if not self.on_gpu:
            try:
                pages_bytes = self.chosen.pool_bytes + self.chosen.host_tier_bytes
                further = sum(part.pool_bytes for part in self.parts)
                refuse_more_than_free(pages_bytes + further, self.free_bytes)
            except ConfigError as error:
                advice.append(error.message)
        return tuple(filter(None, advice))


def make_bill(flags: BillFlags) -> Bill:
    """Counts, reads and measures. Raises ServeError for what cannot be served or read."""
    model = billed_model(flags)
    forms, longest = form_bills(model), model.plan.longest
    log = read_log(flags.requests, flags.memory.block_size)
    lengths = flags.requests.lengths or _usual_lengths(longest, log)
    if too_long := [length for length in lengths if length > longest]:
        raise ConfigError(
            f"--length {too_long[0]} is more than the {longest} tokens that the model takes", field="length"
        )
    chosen = forms[flags.form].size
    longest_bytes = forms[flags.model.dtype].size.block_bytes * chosen.request(longest).pages
    return Bill(
        flags=flags,
        model=model,
        forms=forms,
        lengths=lengths,
        log=log,
        bytes_per_s=known_bandwidth(model),
        measured=measured(model, chosen.block_bytes, longest_bytes) if flags.machine.measure else None,
        mixed=mixed_bills(model, forms),
        free_bytes=available_memory_bytes(),
        parts=tuple(part_of(model) for part_of in PARTS),
    )


def _usual_lengths(longest: int, log: LogBill | None) -> tuple[int, ...]:
    if log is None:
        return tuple(sorted({max(1, longest // divisor) for divisor in (16, 4, 2, 1)}))
    lengths = {min(log.percentile(percent), longest) for percent in (50, 90, 99)}
    return tuple(sorted(lengths))


def as_json(bill: Bill) -> dict[str, Any]:
    """Returns all numbers, for programs."""
    forms = {name: _form_json(bill, form) for name, form in bill.forms.items()}
    return {
        "model": bill.model.name,
        "kv_format": bill.flags.form,
        "groups": [group.as_json() for group in bill.model.groups],
        "weight_bytes": bill.model.plan.weights.total,
        "step_weight_bytes": bill.model.plan.weights.step,
        "working_bytes": bill.model.plan.working_bytes,
        **{part.name: part.json for part in bill.parts},
        "forms": forms,
        "requests": [dataclasses.asdict(bill.chosen.size.request(tokens)) for tokens in bill.lengths],
        "bytes_per_s": bill.bytes_per_s,
        "tiers": _tiers_json(bill),
        "mixed": [dataclasses.asdict(mixed) for mixed in bill.mixed],
        "log": _log_json(bill),
        "advice": list(bill.advice()),
    }


def _form_json(bill: Bill, form: FormBill) -> dict[str, Any]:
    pages = {"device": form.size.pages, "host": form.host_pages, "disk": form.disk_pages}
    found: dict[str, Any] = {
        "bytes_per_token": form.token_bytes,
        "page_bytes": form.size.block_bytes,
        "pages": pages,
        "pool_bytes": form.pool_bytes,
        "concurrent": {str(tokens): concurrent(bill, form, tokens) for tokens in bill.lengths},
    }
    if bill.log is not None:
        points = [bill.log.at(bill.capacity_tokens(form, tier)) for tier in range(3)]
        found["hit_rates"] = [dataclasses.asdict(point) for point in points]
    return found


def concurrent(bill: Bill, form: FormBill, tokens: int) -> int:
    return form.size.concurrent(tokens, bill.flags.requests.shared)


def _tiers_json(bill: Bill) -> dict[str, Any] | None:
    found, most = bill.measured, bill.chosen.size.request(bill.longest).pages
    if found is None:
        return None
    computing = None if found.compute is None else dataclasses.asdict(found.compute)
    tiers = [
        dataclasses.asdict(tier)
        | {"break_even_pages": None if found.compute is None else break_even_pages(tier, found.compute, most)}
        for tier in found.tiers
    ]
    return {"compute": computing, "tiers": tiers}


def _log_json(bill: Bill) -> dict[str, Any] | None:
    log = bill.log
    if log is None:
        return None
    return {
        "name": log.name,
        "requests": log.requests,
        "prompt_tokens": log.prompt_tokens,
        "output_tokens": log.output_tokens,
        "measured_hit_rate": log.measured,
        "most": log.most,
        "distinct_tokens": log.distinct_tokens,
        "curve": [dataclasses.asdict(point) for point in log.curve],
        "concurrent": fitting(bill, bill.chosen),
    }


def fitting(bill: Bill, form: FormBill) -> tuple[int, int] | None:
    """Returns how many requests of the log fit at once, on average and in 99 of 100 draws; None without a log."""
    if bill.log is None:
        return None
    spread = bill.log.spread(form.size.block_size)
    return form.size.concurrent_of(spread), form.size.concurrent_of(spread, SURE)
