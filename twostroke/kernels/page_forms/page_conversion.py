"""Converts a page into one of another form: to the bits that the other form's kernels store for the same keys and
values.

Numbers of one byte are multiplied by their scales first, as attention does. A page in the order of native kernels
(`native/page.h`) is first brought into plain rows of tokens, and then into the order of the other form.
"""

from __future__ import annotations

import itertools
from typing import Final

import torch

from twostroke.kernels.page_forms.form_kernels import ConvertiblePage, kernels_of
from twostroke.kv_cache.form import AnyForm, Conversion, page_form
from twostroke.page_forms.page_form import PagePart

CHUNK_NUMBERS: Final = 1 << 16
"""Number of values that are converted together: they stay in a core's cache."""


def convert_page(conversion: Conversion, source: torch.Tensor, target: torch.Tensor) -> None:
    """Fills `target`, uint8 [target page bytes], with what `source`, uint8 [source page bytes], stores.

    Raises ConfigError for a form that cannot store such heads or blocks.
    """
    shape = conversion.shape
    chunk = max(1, CHUNK_NUMBERS // (2 * shape.kv_heads * shape.block * shape.head_dim))
    pages = (
        _parts(conversion, page_form(form.format), data)
        for form, data in ((conversion.source, source), (conversion.target, target))
    )
    for (there, read), (here, written) in itertools.product(*pages):
        heads, layers = _common(there.heads, here.heads), _common(there.layers, here.layers)
        if not heads or not layers:
            continue
        own, others = (_within(heads, part.heads) for part in (here, there))
        if there.form == here.form:
            places = written.parts(_within(layers, here.layers), own)
            for place, numbers in zip(places, read.parts(_within(layers, there.layers), others), strict=True):
                place.copy_(numbers)
            continue
        for first in range(layers.start, layers.stop, chunk):
            some = range(first, min(first + chunk, layers.stop))
            rows = read.read(_within(some, there.layers))[:, :, others]
            written.write(_within(some, here.layers), own, rows)


def _common(one: slice, other: slice) -> range:
    """Returns the indices that two slices have in common; an empty range if there are none."""
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))


def _within(numbers: range, whole: slice) -> slice:
    """Returns the slice of consecutive indices within a slice that contains them."""
    return slice(numbers.start - whole.start, numbers.stop - whole.start)


def _parts(conversion: Conversion, form: AnyForm, data: torch.Tensor) -> list[tuple[PagePart, ConvertiblePage]]:
    """Returns the parts of the page in `data`, each with a view of its numbers."""
    return [(part, _part_of(conversion, part, data[part.bytes])) for part in form.parts(conversion.shape)]


def _part_of(conversion: Conversion, part: PagePart, data: torch.Tensor) -> ConvertiblePage:
    centers = conversion.key_centers
    own = None if centers is None else torch.from_numpy(centers[part.layers, part.heads])
    return kernels_of(part.form).page_over(data, part, own, has_pieces=conversion.has_pieces)
