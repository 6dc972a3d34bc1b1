"""The bill as one HTML page, with the hit rate by capacity as a curve. The page needs no network."""

from __future__ import annotations

from typing import Final

from tools.bill.bill import Bill
from tools.bill.report import heading, notes, tables
from tools.figures.charts import Figure, Head, Line, Section, Words, bar_figure, colours_of, line_figure, render

SMALLER_FORMS: Final = ("int8", "int4")
"""Forms whose curves stand beside the chosen one's: what their smaller pages buy."""
OPTIMUM: Final = "optimum"


def render_page(bill: Bill) -> str:
    names = tuple(bill.forms)
    colours = colours_of(names)
    sections = [*([_curve(bill, colours)] if bill.log is not None else []), _fitting(bill, colours)]
    sections += [Section(title, grid=grid) for title, grid in tables(bill)]
    sections.append(Section("Notes", items=(*notes(bill), *bill.advice())))
    return render(Head("twostroke bill", heading(bill), names), sections)


def _curve(bill: Bill, colours: dict[str, int]) -> Section:
    log = bill.log
    assert log is not None
    chosen = bill.flags.form
    lines = [_line(bill, chosen, colours, is_optimum=True)]
    lines += [_line(bill, form, colours) for form in dict.fromkeys((chosen, *SMALLER_FORMS))]
    words = Words("hit rate by bytes of pages", "GiB of pages", "share of prompt tokens")
    text = (
        f"{log.requests} requests of {log.name}. Lines: pages evicted by least recent use, in {chosen} and smaller "
        f"forms; dashed: the optimum in {chosen}, which knows the future."
    )
    return Section("Hit rate by capacity", text, figures=(Figure(words.title, line_figure(lines, words, log_x=True)),))


def _line(bill: Bill, form: str, colours: dict[str, int], *, is_optimum: bool = False) -> Line:
    assert bill.log is not None
    token_bytes = bill.forms[form].token_bytes
    points = tuple(
        (point.capacity_tokens * token_bytes / (1 << 30), point.optimum if is_optimum else point.lru)
        for point in bill.log.curve
    )
    return Line(colours[form], points, is_optimum, OPTIMUM if is_optimum else form)


def _fitting(bill: Bill, colours: dict[str, int]) -> Section:
    shared = bill.flags.requests.shared
    sizes = {colours[name]: form.size for name, form in bill.forms.items()}
    groups = [
        (f"{tokens}", [(colour, float(size.concurrent(tokens, shared))) for colour, size in sizes.items()])
        for tokens in bill.lengths
    ]
    words = Words("requests that fit at once, by their length", "tokens of a request", "requests; dashed: slots")
    slots = float(bill.flags.model.max_num_seqs)
    return Section("Requests at once", figures=(Figure(words.title, bar_figure(groups, words, slots)),))
