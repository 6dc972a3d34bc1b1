"""Page forms: how a page stores the keys and values of its block. Plain numbers, no torch.

A form says in which number format keys and values lie in a page, and which scales belong to them. Scales are part of
the page: no scale crosses a page, so a page can be moved, digested and read alone. Attention reads what the page
stores, also in the step that writes it, so a page never changes an answer.

All layers of a page have the same form, or only those in the middle: then the layers at both ends are exact.

The identity of a page is (block hash, `KvForm`): its number format, and whether another format may have computed it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from twostroke.base.errors import ConfigError

if TYPE_CHECKING:  # this is read where nothing else needs arrays
    import numpy as np
    import numpy.typing as npt

SCALE_BYTES: Final = 4
"""One float32 scale of a token's key or value in one head."""
PAIR_BYTES: Final = 4
"""A float16 scale and a float16 center of a group of 4-bit numbers."""
VALUE_GROUP: Final = 32
"""Values of one token that share a scale where values have 4 bits."""


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """Some of a model's layers, in order."""

    indices: tuple[int, ...]
    model_layers: int
    """Layers of the whole model."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """The dimensions of a page: [layers, 2, kv_heads, block, head_dim], keys then values.

    Pages of latents hold only keys, [layers, 1, 1, block, head_dim]: values are the first numbers of keys.
    """

    layers: int
    kv_heads: int
    block: int
    """Tokens of a block."""
    head_dim: int
    """Numbers of a key."""
    latent_dim: int | None = None
    """Numbers of a latent, with which keys begin; None where values lie beside keys."""
    selection: LayerSelection | None = None
    """Which of the model's layers these are; None: all of them."""

    def of_layers(self, indices: tuple[int, ...]) -> PageShape:
        """Returns the shape of pages that hold some of the layers of these, which are all of the model's."""
        return replace(self, layers=len(indices), selection=LayerSelection(indices, self.layers))

    @property
    def selected(self) -> LayerSelection:
        return self.selection or LayerSelection(tuple(range(self.layers)), self.layers)

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2 if self.latent_dim is None else 1, self.kv_heads, self.block, self.head_dim)


@dataclass(frozen=True, slots=True)
class PageForm:
    """How the keys and values of a block are stored for one head and layer, or for all of a page."""

    name: str
    """The word that --kv-format takes."""
    key_bytes: Callable[[PageShape], int]
    """Bytes of the keys of one block in one head of one layer, scales included."""
    value_bytes: Callable[[PageShape], int]
    help: str
    spans_block: bool = False
    """Scales span the tokens of a block: it is stored when its last token is there, and its own tokens see it exact."""
    stores_latents: bool = False
    """Whether pages of latents may have this form."""

    def head_bytes(self, shape: PageShape) -> int:
        """Returns the bytes of the keys and values of one block in one head of one layer."""
        return self.key_bytes(shape) + (self.value_bytes(shape) if shape.latent_dim is None else 0)

    def page_bytes(self, shape: PageShape) -> int:
        """Returns the bytes of a whole page."""
        return shape.layers * shape.kv_heads * self.head_bytes(shape)

    def parts(self, shape: PageShape) -> tuple[PagePart, ...]:
        return (PagePart(self, shape),)


@dataclass(frozen=True, slots=True)
class PagePart:
    """Layers and heads that lie side by side in a page, all in one form."""

    form: PageForm
    shape: PageShape
    """The dimensions of only this part."""
    first_layer: int = 0
    first_byte: int = 0
    first_head: int = 0

    @property
    def layers(self) -> slice:
        """Returns which layers of the page these are."""
        return slice(self.first_layer, self.first_layer + self.shape.layers)

    @property
    def heads(self) -> slice:
        """Returns which heads of the page these are."""
        return slice(self.first_head, self.first_head + self.shape.kv_heads)

    @property
    def bytes(self) -> slice:
        return slice(self.first_byte, self.first_byte + self.form.page_bytes(self.shape))


@dataclass(frozen=True, slots=True)
class FormWithExactEnds:
    """The form of pages with first and last layers in another form: that of the numbers the model computes with."""

    inner: PageForm
    exact: PageForm
    exact_layers: int
    """Layers at each end."""

    @property
    def name(self) -> str:
        return f"{self.inner.name}+{self.exact_layers}x{self.exact.name}"

    @property
    def spans_block(self) -> bool:
        return self.inner.spans_block

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

    A page also says so where all processes have the same heads: its numbers are sums of as many parts.
    """

    inner: PageForm | FormWithExactEnds
    """The form of a process's part."""
    processes: int

    @property
    def name(self) -> str:
        return f"{self.inner.name}/{self.processes}"

    @property
    def spans_block(self) -> bool:
        return self.inner.spans_block

    def page_bytes(self, shape: PageShape) -> int:
        """Returns the bytes of a whole page. Raises ConfigError as the inner form does."""
        return self.inner.page_bytes(shape)

    def parts(self, shape: PageShape) -> tuple[PagePart, ...]:
        """Returns the parts of a page, range by range of heads. Raises ConfigError as the inner form does."""
        ranges = self.ranges(shape.kv_heads)
        of_range = replace(shape, kv_heads=shape.kv_heads // ranges)
        part_bytes = self.inner.page_bytes(of_range)
        return tuple(
            replace(part, first_byte=part.first_byte + at * part_bytes, first_head=at * of_range.kv_heads)
            for at in range(ranges)
            for part in self.inner.parts(of_range)
        )

    def ranges(self, kv_heads: int) -> int:
        """Returns in how many ranges the heads of a page lie: fewer than processes where these share heads."""
        return min(self.processes, kv_heads)


AnyForm = PageForm | FormWithExactEnds | JointForm


def check_latents(shape: PageShape, form: AnyForm) -> None:
    """Raises ConfigError for latents in a form that has scales.

    One scale for a latent and a rotated key would lose the smaller of them.
    """
    inner = form.inner if isinstance(form, JointForm) else form
    if shape.latent_dim is None or (isinstance(inner, PageForm) and inner.stores_latents):
        return
    names = ", ".join(form.name for form in FORMS.values() if form.stores_latents)
    raise ConfigError(
        f"--kv-format {form.name} is not served for models whose pages hold latents: use {names}", field="kv_format"
    )


def _plain(name: str, element_bytes: int, text: str) -> PageForm:
    def both(shape: PageShape) -> int:
        return shape.block * shape.head_dim * element_bytes

    return PageForm(name, both, both, text, stores_latents=True)


def _scaled_per_token(name: str, text: str) -> PageForm:
    def both(shape: PageShape) -> int:
        return shape.block * (shape.head_dim + SCALE_BYTES)

    return PageForm(name, both, both, text)


def _int4_keys(shape: PageShape) -> int:
    """Returns the bytes of 4-bit keys with one scale per channel over the block."""
    return shape.head_dim * (shape.block // 2 + PAIR_BYTES)


def _int4_values(shape: PageShape) -> int:
    """Returns the bytes of 4-bit values with one scale per token and group of channels."""
    groups = -(-shape.head_dim // VALUE_GROUP)
    return shape.block * (shape.head_dim // 2 + groups * PAIR_BYTES)


@dataclass(frozen=True, slots=True)
class KvForm:
    """The form of all pages of one worker. It is a part of their identity, with the block hash."""

    format: str
    """A name that `page_form` takes."""
    converted_from: str | None = None
    """The format of the pages that are converted into these. Pages of such a form may come from there, or follow pages
    that do. They are never taken for pages that were computed only in `format` alone."""

    def __str__(self) -> str:
        return self.format if self.converted_from is None else f"{self.format} from {self.converted_from}"

    def takes(self, other: KvForm) -> bool:
        """Tells whether pages of the other form may become pages of this one, as they are or converted."""
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
    """Native kernels order the numbers: `twostroke/kernels/cpu/native/page.h`."""
    key_centers: npt.NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    """[layers, kv_heads, head_dim]: what keys of forms with one scale per token lack; None where they lack nothing."""
    further: tuple[Conversion, ...] = ()
    """How pages of the groups beside the first one are converted."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a converted page."""
        return page_form(self.target.format).page_bytes(self.shape)

    @property
    def groups(self) -> tuple[Conversion, ...]:
        """The conversions of the pages of each group."""
        return (self, *self.further)


FORMS: Final = {
    form.name: form
    for form in (
        _plain("bfloat16", 2, "16-bit numbers with the range of float32"),
        _plain("float16", 2, "16-bit numbers with more digits and less range"),
        _plain("float32", 4, "32-bit numbers"),
        _scaled_per_token("fp8_e4m3", "8-bit floats with 3 digits, one scale per token and head"),
        _scaled_per_token("fp8_e5m2", "8-bit floats with 2 digits, one scale per token and head"),
        _scaled_per_token("int8", "8-bit integers, one scale per token and head"),
        PageForm(
            "int4",
            _int4_keys,
            _int4_values,
            "4-bit integers: keys scaled per channel, values per token and group",
            spans_block=True,
        ),
    )
}
"""All forms that a layer can have, by name."""
_EXACT_ENDS: Final = re.compile(r"(\w+)\+(\d+)x(\w+)")
_JOINT: Final = re.compile(r"(.+)/(\d+)")


def page_form(name: str) -> AnyForm:
    """Returns the form of a name of `FORMS`, or of a name that `config.cache.form_name` made of some."""
    joint = _JOINT.fullmatch(name)
    return _of_one(name) if joint is None else JointForm(_of_one(joint[1]), int(joint[2]))


def _of_one(name: str) -> PageForm | FormWithExactEnds:
    matched = _EXACT_ENDS.fullmatch(name)
    if matched is None:
        return FORMS[name]
    return FormWithExactEnds(FORMS[matched[1]], FORMS[matched[3]], int(matched[2]))
