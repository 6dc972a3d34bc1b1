"""The bill as tables in the terminal, and as one HTML page with the hit rate by capacity as a curve.

The page needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.markup import escape

from tools.bill.bill import Bill, concurrent, fitting
from tools.bill.forms import FormBill
from tools.bill.layer_groups import LayerGroup
from tools.bill.measure import ComputeCost, break_even_pages
from tools.bill.parts import size
from tools.figures.charts import Figure, Head, Line, Section, Words, bar_figure, colours_of, line_figure, render
from tools.tables import Cell, Grid, Row, table_of, text_grid, text_row
from twostroke.config import Role
from twostroke.kv_cache.form import page_form
from twostroke.kv_cache.pool_size import PoolSize

CURVE_ROWS: Final = 12
"""Rows of the curve in the terminal; the page has a figure."""
SMALLER_FORMS: Final = ("int8", "int4")
"""Forms whose curves stand beside the chosen one's: what their smaller pages buy."""
OPTIMUM: Final = "optimum"


def print_bill(console: Console, bill: Bill) -> None:
    console.print(heading(bill), markup=False)
    for title, grid in tables(bill):
        console.print(f"\n[bold]{escape(title)}[/bold]")
        console.print(table_of(grid))
    for line in (*notes(bill), *bill.advice()):
        console.print(line, markup=False)


def heading(bill: Bill) -> str:
    model, memory = bill.model, bill.flags.memory
    place = "on a GPU" if bill.on_gpu else "on a CPU"
    return (
        f"{model.name} {place}: pages in {bill.flags.form}, blocks of {memory.block_size} tokens, requests of up to "
        f"{bill.longest} tokens"
    )


def tables(bill: Bill) -> list[tuple[str, Grid]]:
    """Returns all tables that there is something for, each with its title."""
    are_unlike = any(part.are_roles_unlike for part in bill.parts)
    found = [
        ("Memory of one decode worker" if are_unlike else "Memory of one worker", memory_grid(bill)),
        *([("Bytes per token, by group of layers", groups_grid(bill))] if bill.model.groups else []),
        *(table for part in bill.parts for table in part.tables),
        ("Pages by form", forms_grid(bill)),
        (f"Requests, pages in {bill.flags.form}", requests_grid(bill)),
    ]
    if bill.mixed:
        form = bill.model.config(Role.PREFILL).kv_format
        found.append((f"Prefill workers with {form}, decode workers with another form", mixed_grid(bill)))
    if bill.bytes_per_s is not None and bill.model.plan.weights.step:
        found.append((ceiling_title(bill.bytes_per_s), ceiling_grid(bill, bill.bytes_per_s)))
    if bill.measured is not None:
        found.append((f"Loading against computing, pages in {bill.flags.form}", tiers_grid(bill)))
    if bill.log is not None:
        found.append((log_title(bill), hit_rates_grid(bill)))
        found.append((f"Hit rate by capacity, pages in {bill.flags.form}", curve_grid(bill)))
    return found


def memory_grid(bill: Bill) -> Grid:
    pool = bill.chosen
    rows = [
        ("weights", bill.model.plan.weights.total, bill.model.plan.weights_kind),
        ("working set", bill.model.plan.working_bytes, "activations and logits of a step, process, libraries"),
        ("pages", pool.pool_bytes, f"{_pages_of(pool.size)}, scratch pages, generations"),
        *([("host tier", pool.host_tier_bytes, f"{pool.host_pages} pages")] if pool.host_pages else []),
        *(row for part in bill.parts for row in part.rows),
        ("together", bill.total_bytes, "" if bill.on_gpu else f"this machine has {size(bill.free_bytes)} free"),
    ]
    return text_grid(
        ("part", "bytes", "size", "what"),
        [text_row(part, f"{count}", size(count), what) for part, count, what in rows],
    )


def _pages_of(pool: PoolSize) -> str:
    """Says how many pages there are, of each group where they lie apart."""
    further = [f", {group.pages} of layers that keep the last blocks only" for group in pool.further]
    return f"{pool.pages} pages{''.join(further)}"


def groups_grid(bill: Bill) -> Grid:
    forms, block, rows = tuple(bill.forms), bill.flags.memory.block_size, []
    for group in bill.model.groups:
        shape = group.shape
        name = f"{group.kind}, {shape.layers} layers, {shape.kv_heads} x {shape.head_dim}"
        rows.append(text_row(name, *(f"{group.page_bytes(form) / block:g}" for form in forms)))
        rows += [text_row(*cells) for cells in _part_cells(bill, group)]
    return text_grid(("group", *forms), rows)


def _part_cells(bill: Bill, group: LayerGroup) -> Iterator[tuple[str, ...]]:
    """Yields the bytes of each part of a group, where the layers of a billed page have more than one form."""
    chosen, block = bill.flags.form, bill.flags.memory.block_size
    parts = page_form(chosen).parts(group.shape)
    for part in parts if len(parts) > 1 else ():
        layers, token_bytes = part.layers, part.form.page_bytes(part.shape) / block
        name = f"layers {layers.start} to {layers.stop - 1} of them in {part.form.name}"
        yield (name, *(f"{token_bytes:g}" if form == chosen else "" for form in bill.forms))


def forms_grid(bill: Bill) -> Grid:
    headings = ["form", "B/token", "B/page", "of bfloat16"]
    headings += [f"{tier} pages" for tier in bill.tiers]
    headings += ["device tokens", *(f"{tokens} at once" for tokens in bill.lengths)]
    if bill.log is not None:
        headings.append("of the log at once")
    return text_grid(headings, [_form_row(bill, form) for form in bill.forms.values()])


def _form_row(bill: Bill, form: FormBill) -> Row:
    ratio = form.size.block_bytes / bill.forms["bfloat16"].size.block_bytes
    pages = {"device": form.size.pages, "host": form.host_pages, "disk": form.disk_pages}
    cells = [
        form.form,
        f"{form.token_bytes:g}",
        f"{form.size.block_bytes}",
        f"{ratio:.3f}x",
        *(f"{pages[tier]}" for tier in bill.tiers),
        f"{form.size.tokens}",
        *(f"{concurrent(bill, form, tokens)}" for tokens in bill.lengths),
    ]
    counts = fitting(bill, form)
    if counts is not None:
        cells.append(f"{counts[0]} ({counts[1]} for sure)")
    return text_row(*cells)


def mixed_grid(bill: Bill) -> Grid:
    """Rows are forms of decode workers' pages."""
    own = bill.chosen.size
    rows = []
    for mixed in bill.mixed:
        seconds = "-" if mixed.conversion_s is None else _ms(mixed.conversion_s)
        share = mixed.prefill_pages / own.pages if own.pages else 0.0
        cells = (f"{mixed.sent_page_bytes}", f"{mixed.sent_page_bytes / own.block_bytes:.3f}x")
        rows.append(text_row(mixed.form, *cells, f"{mixed.prefill_pages}", f"{share:.3f}x", seconds))
    headings = (
        "decode form",
        "B/page moved",
        f"of {bill.flags.form}",
        "prefill pages",
        "of one form",
        "to convert a page",
    )
    return text_grid(headings, rows)


def requests_grid(bill: Bill) -> Grid:
    pool, rows = bill.chosen.size, []
    for tokens in bill.lengths:
        request = pool.request(tokens)
        waste_bytes = request.waste_tokens * bill.chosen.token_bytes
        rows.append(
            text_row(
                f"{tokens} tokens",
                f"{request.pages}",
                size(pool.request_bytes(tokens)),
                f"{request.waste_tokens} tokens",
                f"{waste_bytes / pool.request_bytes(tokens):.1%}",
                f"{concurrent(bill, bill.chosen, tokens)}",
                _cliff(bill, tokens),
            )
        )
    return text_grid(("request", "pages", "bytes", "tail waste", "share", "fit at once", "one more"), rows)


def _cliff(bill: Bill, tokens: int) -> str:
    """Says what happens with one request more than fit."""
    fit, slots = concurrent(bill, bill.chosen, tokens), bill.flags.model.max_num_seqs
    if not fit:
        return "refused: it never fits"
    return "waits: all slots are in use" if fit >= slots else "waits, or preempts another one"


def ceiling_title(bytes_per_s: float) -> str:
    return f"Decode ceiling at {bytes_per_s / 1e9:.1f} GB/s: tokens/s of all streams together"


def ceiling_grid(bill: Bill, bytes_per_s: float) -> Grid:
    """Rows are forms; columns are streams, each with the longest of the lengths."""
    tokens, slots = bill.lengths[-1], bill.flags.model.max_num_seqs
    streams = [count for count in (1, 4, 16, 64, 256) if count <= slots]
    rows = []
    for form in bill.forms.values():
        most = min(slots, concurrent(bill, form, tokens))
        cells = [_rate(form, bytes_per_s, count, tokens) if count <= most else "-" for count in streams]
        last = f"{_rate(form, bytes_per_s, most, tokens)} with {most}" if most else "-"
        rows.append(text_row(form.form, size(form.step_bytes(1, tokens)), *cells, last))
    at = [f"{count} x {tokens}" for count in streams]
    return text_grid(("form", "read by one step", *at, "all that fit"), rows)


def _rate(form: FormBill, bytes_per_s: float, streams: int, tokens: int) -> str:
    ceiling = form.ceiling(bytes_per_s, streams, tokens)
    return "-" if ceiling is None else f"{ceiling:.0f}"


def tiers_grid(bill: Bill) -> Grid:
    assert bill.measured is not None
    compute, lengths = bill.measured.compute, [bill.chosen.size.request(tokens) for tokens in bill.lengths]
    rows = []
    if compute is not None:
        times = [_ms(compute.compute_s(request.pages)) for request in lengths]
        rows.append(text_row("computing", _ms(compute.compute_s(1)), _ms(_computed_page_s(compute)), *times, ""))
    for tier in bill.measured.tiers:
        times = [_ms(tier.load_s(request.pages)) for request in lengths]
        rows.append(text_row(tier.tier, _ms(tier.first_s), _ms(tier.page_s), *times, _break_even(bill, tier.tier)))
    headings = ("pages from", "first page", "each page", *(f"{request.tokens} tokens" for request in lengths))
    return text_grid((*headings, "pays from"), rows)


def _computed_page_s(compute: ComputeCost) -> float:
    pages = max(1, compute.step_tokens // compute.block_size)
    return compute.compute_s(pages) / pages


def _break_even(bill: Bill, name: str) -> str:
    assert bill.measured is not None
    compute, block_size = bill.measured.compute, bill.flags.memory.block_size
    tier = next(each for each in bill.measured.tiers if each.tier == name)
    if compute is None:
        return "-"
    pages = break_even_pages(tier, compute, bill.chosen.size.request(bill.longest).pages)
    return "never" if pages is None else f"{pages * block_size} tokens"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def log_title(bill: Bill) -> str:
    log = bill.log
    assert log is not None
    measured = "" if log.measured is None else f"; the log's own rate is {log.measured:.1%}"
    return f"Hit rate of {log.name}: {log.requests} requests{measured}"


def hit_rates_grid(bill: Bill) -> Grid:
    """Rows are forms; for each tier the hit rate of all tiers up to it, least recent and at best."""
    log = bill.log
    assert log is not None
    kept = [("device", 0), ("host", 1), ("disk", 2)]
    tiers = [(name, tier) for name, tier in kept if name in bill.tiers]
    rows = []
    for form in bill.forms.values():
        cells = []
        for _, tier in tiers:
            point = log.at(bill.capacity_tokens(form, tier))
            cells += [f"{point.lru:.1%}", f"{point.optimum:.1%}"]
        rows.append(text_row(form.form, *cells))
    names = [("" if not tier else "+ ") + name for name, tier in tiers]
    return text_grid(("form", *(f"{name} {what}" for name in names for what in ("LRU", "optimum"))), rows)


def curve_grid(bill: Bill) -> Grid:
    log = bill.log
    assert log is not None
    stride = max(1, len(log.curve) // CURVE_ROWS)
    points = [*log.curve[::stride], *([] if (len(log.curve) - 1) % stride == 0 else [log.curve[-1]])]
    rows = [
        Row(
            None,
            (
                Cell(size(point.capacity_tokens * bill.chosen.token_bytes)),
                Cell(f"{point.capacity_tokens}"),
                Cell(f"{point.lru:.1%}"),
                Cell(f"{point.optimum:.1%}"),
            ),
        )
        for point in points
    ]
    return text_grid(("pages", "tokens", "LRU", "optimum"), rows)


def notes(bill: Bill) -> list[str]:
    """Says what the tables do not show."""
    found = []
    if bill.log is not None:
        found.append(
            f"a pool that never evicts finds {bill.log.most:.1%} and holds "
            f"{size(bill.log.distinct_tokens * bill.chosen.token_bytes)} of {bill.flags.form} pages in the end"
        )
        longer = sum(length > bill.longest for length in bill.log.lengths)
        if longer:
            found.append(f"{longer} requests of the log are longer than {bill.longest} tokens: they are refused")
    found += [note for part in bill.parts for note in part.notes]
    if bill.bytes_per_s is None and bill.model.plan.weights.step:
        hint = "" if bill.on_gpu else ", or measure this machine with --measure"
        found.append(f"the decode ceiling is not known: give --bandwidth GB/S{hint}")
    return found


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
