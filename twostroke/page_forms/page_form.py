"""A page form defines how a page stores keys and values: their number format, and the scales that belong to them. No
torch.

Scales are part of the page: no scale crosses a page, so a page can be moved, digested and read alone. Attention reads
what the page stores, also in the step that writes it, so a page never changes an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


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
        """Returns the shape of pages that hold only these layers. This shape must have all layers of the model."""
        return replace(self, layers=len(indices), selection=LayerSelection(indices, self.layers))

    @property
    def selected(self) -> LayerSelection:
        return self.selection or LayerSelection(tuple(range(self.layers)), self.layers)

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2 if self.latent_dim is None else 1, self.kv_heads, self.block, self.head_dim)


def takes_any_shape(shape: PageShape) -> None:
    """Accepts all blocks and heads."""
    del shape


@dataclass(frozen=True, slots=True)
class PageForm:
    """How pages store the keys and values of their blocks."""

    name: str
    """The word that --kv-format takes."""
    key_bytes: Callable[[PageShape], int]
    """Bytes of the keys of one block in one head of one layer, scales included."""
    value_bytes: Callable[[PageShape], int]
    help: str
    kernels: str
    """The module whose `KERNELS` compute with pages of this form: see `twostroke/kernels/page_forms/form_kernels.py`.
    It is loaded when the first pool is made."""
    largest_distance: float
    """The largest distance from exact outputs at which a model that is tried at start is served. Rounding to this form
    stays well below it, and a wrong scale, mask or position is far above."""
    check_shape: Callable[[PageShape], None] = takes_any_shape
    """Raises ConfigError for blocks and heads that this form does not take."""
    spans_block: bool = False
    """Whether scales span the tokens of a block. Such a block is stored once it is full, and attention of its own
    tokens reads it unrounded."""
    stores_latents: bool = False
    """Whether pages of latents may have this form."""
    may_have_exact_layers: bool = False
    """Whether --kv-exact-layers may keep some layers in the model's dtype beside layers of this form."""

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
        """Returns the layers of the page that this part holds."""
        return slice(self.first_layer, self.first_layer + self.shape.layers)

    @property
    def heads(self) -> slice:
        """Returns the heads of the page that this part holds."""
        return slice(self.first_head, self.first_head + self.shape.kv_heads)

    @property
    def bytes(self) -> slice:
        return slice(self.first_byte, self.first_byte + self.form.page_bytes(self.shape))
