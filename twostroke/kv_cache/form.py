"""The form of a worker's pages: that of all layers, or that of the middle layers if the layers at both ends are exact.

`twostroke/page_forms` says what a form is and has one file for each. The identity of a page is (block hash, `KvForm`):
its number format, and whether another format may have computed it. Plain numbers, no torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from twostroke.base.errors import ConfigError
from twostroke.page_forms.page_form import PageForm, PagePart, PageShape
from twostroke.page_forms.table import PAGE_FORMS

if TYPE_CHECKING:  # some importers need numpy for nothing else
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class FormWithExactEnds:
    """The form of pages whose first and last layers have another form: the number format that the model computes in."""

    inner: PageForm
    exact: PageForm
    exact_layers: int
    """Number of exact layers at each end."""

    @property
    def name(self) -> str:
        return f"{self.inner.name}+{self.exact_layers}x{self.exact.name}"

    @property
    def spans_block(self) -> bool:
        return self.inner.spans_block

    @property
    def check_shape(self) -> Callable[[PageShape], None]:
        return self.inner.check_shape

    def page_bytes(self, shape: PageShape) -> int:
        """Returns the bytes of a whole page. Raises ConfigError for a model without layers between the ends."""
        return sum(part.form.page_bytes(part.shape) for part in self.parts(shape))

    def parts(self, shape: PageShape) -> tuple[PagePart, ...]:
        """Returns the parts of a page, in the order of layers. Raises ConfigError as `page_bytes` does."""
        selected = shape.selected
        inner = range(self.exact_layers, selected.model_layers - self.exact_layers)
        if not inner:
            raise ConfigError(
                f"--kv-exact-layers {self.exact_layers} leaves none of this model's {selected.model_layers} layers to "
                f"{self.inner.name}: give at most {(selected.model_layers - 1) // 2}, "
                f"or --kv-format {self.exact.name}",
                field="kv_exact_layers",
            )
        parts: list[PagePart] = []
        first_layer = first_byte = 0
        for is_inner, run in itertools.groupby(selected.indices, key=inner.__contains__):
            some = replace(shape, layers=len(list(run)), selection=None)
            parts.append(PagePart(self.inner if is_inner else self.exact, some, first_layer, first_byte))
            first_layer, first_byte = parts[-1].layers.stop, parts[-1].bytes.stop
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class JointForm:
    """The form of pages that several processes compute: each range of heads is a page of its own, side by side.

    The name has the number of processes even where all have the same heads: each number of a page is then a sum of that
    many parts.
    """

    inner: PageForm | FormWithExactEnds
    """The form of the part that one process computes."""
    processes: int

    @property
    def name(self) -> str:
        return f"{self.inner.name}/{self.processes}"

    @property
    def spans_block(self) -> bool:
        return self.inner.spans_block

    @property
    def check_shape(self) -> Callable[[PageShape], None]:
        return self.inner.check_shape

    def page_bytes(self, shape: PageShape) -> int:
        """Returns the bytes of a whole page. Raises ConfigError as the inner form does."""
        return self.inner.page_bytes(shape)

    def parts(self, shape: PageShape) -> tuple[PagePart, ...]:
        """Returns the parts of a page, range by range of heads. Raises ConfigError as the inner form does."""
        ranges = self.ranges(shape.kv_heads)
        of_range = replace(shape, kv_heads=shape.kv_heads // ranges)
        part_bytes = self.inner.page_bytes(of_range)
        return tuple(
            replace(part, first_byte=part.first_byte + index * part_bytes, first_head=index * of_range.kv_heads)
            for index in range(ranges)
            for part in self.inner.parts(of_range)
        )

    def ranges(self, kv_heads: int) -> int:
        """Returns the number of head ranges of a page: fewer than there are processes if processes share heads."""
        return min(self.processes, kv_heads)


AnyForm = PageForm | FormWithExactEnds | JointForm


def check_latents(shape: PageShape, form: AnyForm) -> None:
    """Refuses latents in a form with scales: a latent and a rotated key would share one. Raises ConfigError."""
    inner = form.inner if isinstance(form, JointForm) else form
    if shape.latent_dim is None or (isinstance(inner, PageForm) and inner.stores_latents):
        return
    names = ", ".join(form.name for form in FORMS.values() if form.stores_latents)
    raise ConfigError(
        f"--kv-format {form.name} is not served for models whose pages hold latents: use {names}", field="kv_format"
    )


@dataclass(frozen=True, slots=True)
class KvForm:
    """The form of all pages of one worker. It is a part of their identity, with the block hash."""

    format: str
    """Name of the form, as `page_form` takes it."""
    converted_from: str | None = None
    """The format of the pages that are converted into these; None: no page is converted. A page of such a form may be
    converted, or be computed after converted ones. It never replaces a page that was computed in `format` alone."""

    def __str__(self) -> str:
        return self.format if self.converted_from is None else f"{self.format} from {self.converted_from}"

    def takes(self, other: KvForm) -> bool:
        """Returns whether pages of the other form may become pages of this one, unchanged or converted."""
        return other in (self, self.source)

    @property
    def source(self) -> KvForm | None:
        """The form of the pages that are converted into this one."""
        return None if self.converted_from is None else KvForm(self.converted_from)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How pages of one worker are converted for workers of another form."""

    source: KvForm
    target: KvForm
    shape: PageShape
    has_pieces: bool
    """Whether native kernels order the numbers: `twostroke/kernels/cpu/native/page.h`."""
    key_centers: npt.NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """[layers, kv_heads, head_dim]: what keys of forms with one scale per token lack; None where they lack nothing."""
    further: tuple[Conversion, ...] = ()
    """The conversions of the further page groups."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a converted page."""
        return page_form(self.target.format).page_bytes(self.shape)

    @property
    def groups(self) -> tuple[Conversion, ...]:
        """The conversion of each page group, the first group's first."""
        return (self, *self.further)


FORMS: Final = {form.name: form for form in PAGE_FORMS}
"""All forms that a layer can have, by name."""
_EXACT_ENDS: Final = re.compile(r"(\w+)\+(\d+)x(\w+)")
_JOINT: Final = re.compile(r"(.+)/(\d+)")


def page_form(name: str) -> AnyForm:
    """Returns the form with a name of `FORMS`, or with a name that `config.cache.form_name` composed of such names."""
    joint = _JOINT.fullmatch(name)
    return _of_one(name) if joint is None else JointForm(_of_one(joint[1]), int(joint[2]))


def _of_one(name: str) -> PageForm | FormWithExactEnds:
    matched = _EXACT_ENDS.fullmatch(name)
    if matched is None:
        return FORMS[name]
    return FormWithExactEnds(FORMS[matched[1]], FORMS[matched[3]], int(matched[2]))
