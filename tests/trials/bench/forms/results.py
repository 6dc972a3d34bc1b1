"""What was measured of each form, and its table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rich.table import Table

from tests.trials.bench.forms.form_model import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class FormResult:
    """What is None was left out."""

    form: str
    page_bytes: int
    perplexity: float | None
    mean_kl: float | None
    """Mean over positions, in nats: how many more are needed to code what the compared form predicts."""
    same: float | None
    """Share of positions at which the likeliest token is the same."""
    shared_tokens: tuple[int, ...] | None
    """Tokens of each greedy continuation before the first one that differs from the compared form's."""
    retrieved: tuple[bool, ...] | None
    """Whether each planted fact was found, from the first to the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    model: str
    dtype: str
    context_tokens: int
    """Most tokens of the text with planted facts, question and answer included."""
    results: tuple[FormResult, ...]
    """First the form that the others are compared with."""


def table_of(found: ModelResult) -> Table:
    title = f"forms of pages: {found.model}, facts in {found.context_tokens:,} tokens"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    columns = ("bytes/token", "of exact", "perplexity", "change", "mean KL", "same token", "greedy shared", "facts")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for each in found.results:
        table.add_row(*_row(each, found.results[0]))
    return table


def _row(each: FormResult, exact: FormResult) -> tuple[str, ...]:
    change = None
    if each.perplexity is not None and exact.perplexity is not None:
        change = each.perplexity / exact.perplexity - 1
    return (
        each.form,
        f"{each.page_bytes / BLOCK:.0f}",
        f"{each.page_bytes / exact.page_bytes:.3f}",
        _shown(each.perplexity, ".3f"),
        _shown(change, "+.2%"),
        _shown(each.mean_kl, ".2e"),
        _shown(each.same, ".1%"),
        "" if each.shared_tokens is None else f"{statistics.mean(each.shared_tokens):.1f}",
        "" if each.retrieved is None else f"{sum(each.retrieved)} of {len(each.retrieved)}",
    )


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
