"""Pages whose first and last layers are exact: each layer is stored and attended to as in pages of its form alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from tests.covering import pairwise
from tests.unit.kernels.page_forms.test_page_forms import (
    PATHS,
    SLACK,
    STEADY,
    VARIANTS,
    Prompts,
    backend_of,
    random_history,
)
from tests.unit.kernels.variants import LATER_OF_PARTS
from twostroke.base.errors import ConfigError
from twostroke.config.cache import form_name
from twostroke.kernels.attention.interface import AttentionBackend
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kernels.pools.parted_pool import PartedPool
from twostroke.kv_cache.form import FORMS, Conversion, KvForm, page_form
from twostroke.page_forms.page_form import PageShape

LAYERS = 5
Spans = list[tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class EveryLayer:
    """Pages of one form and the backend over them; keys and values are other ones in each layer."""

    prompts: Prompts
    data: torch.Tensor
    backend: AttentionBackend

    @classmethod
    def over(cls, prompts: Prompts, form: str, path: str, kernels: Mapping[str, Kernels], stale: int = 0) -> EveryLayer:
        data = torch.full((len(prompts.lengths) * prompts.blocks, page_form(form).page_bytes(prompts.shape)), stale)
        data = data.to(torch.uint8)
        return cls(prompts, data, backend_of(prompts, prompts.over(data, form), path, kernels))

    def run(self, spans: Spans) -> torch.Tensor:
        """Returns the rows of all layers, [layers, T, heads * D]."""
        step, rows = self.backend.begin(self.prompts.batch(spans)), []
        parts = [[x[start:end] for x in self.prompts.rows(sequence)] for sequence, start, end in spans]
        for layer in range(LAYERS):
            q, k, v = (torch.cat(each).contiguous() * (1 + layer / 4) for each in zip(*parts, strict=True))
            rows.append(step.attend(layer, step.store(layer, q, k, v)))
        return torch.stack(rows)

    def layer(self, form: str, layer: int) -> torch.Tensor:
        """Returns the bytes of a layer of all pages whose blocks are full, [pages, bytes]."""
        full = [
            self.prompts.batch([(sequence, 0, length)]).block_tables[0, : length // 16].long()
            for sequence, length in enumerate(self.prompts.lengths)
        ]
        part = next(
            part for part in page_form(form).parts(self.prompts.shape) if part.layers.start <= layer < part.layers.stop
        )
        of_part = self.data[torch.cat(full), part.bytes].unflatten(1, (part.shape.layers, -1))
        return of_part[:, layer - part.first_layer]


@pairwise(later=LATER_OF_PARTS, path=PATHS, dtype=list(SLACK), exact_layers=[1, 2])
def test_a_layer_is_stored_and_attended_to_as_in_pages_of_its_form_alone(
    built_parts: Mapping[str, Kernels], path: str, dtype: torch.dtype, exact_layers: int
) -> None:
    name = str(dtype).removeprefix("torch.")
    form = form_name("int4", exact_layers, name)
    prompts = Prompts(PageShape(LAYERS, 2, 16, 64), 6, (300, 33) if path in VARIANTS else (60, 33), dtype, 3)
    mixed = EveryLayer.over(prompts, form, path, built_parts, stale=0xFF)
    alone = {each: EveryLayer.over(prompts, each, path, built_parts) for each in (name, "int4")}
    rows, expected = mixed.run(prompts.whole()), {each: of.run(prompts.whole()) for each, of in alone.items()}
    for layer in range(LAYERS):
        own = name if layer < exact_layers or layer >= LAYERS - exact_layers else "int4"
        assert torch.equal(rows[layer], expected[own][layer])
        assert torch.equal(mixed.layer(form, layer), alone[own].layer(own, layer))


@pytest.mark.parametrize("path", STEADY)
@pytest.mark.parametrize("stale", [0x7F, 0xFF])
def test_no_chunk_no_neighbour_and_no_stale_byte_changes_a_bit(
    built_parts: Mapping[str, Kernels], path: str, stale: int
) -> None:
    lengths = (400, 33, 100) if path in VARIANTS else (60, 33)
    prompts = Prompts(PageShape(LAYERS, 2, 16, 64), 6, lengths, torch.bfloat16, stale)
    form = "int4+1xbfloat16"
    once, often = (EveryLayer.over(prompts, form, path, built_parts, byte) for byte in (0, stale))
    expected, starts = once.run(prompts.whole()), [sum(lengths[:sequence]) for sequence in range(len(lengths))]
    for spans in random_history(prompts, stale):
        rows = often.run(spans)
        wanted = [expected[:, starts[s] + start : starts[s] + end] for s, start, end in spans]
        assert torch.equal(rows, torch.cat(wanted, dim=1)), spans
    for layer in range(LAYERS):
        assert torch.equal(often.layer(form, layer), once.layer(form, layer))


@pytest.mark.parametrize("path", VARIANTS)
@pytest.mark.parametrize(
    ("source", "target"),
    [("bfloat16", "int4+2xbfloat16"), ("bfloat16", "int4+1xbfloat16"), ("int4+1xbfloat16", "bfloat16"),
     ("int4+1xbfloat16", "int8"), ("int8", "int4+2xbfloat16")],
)  # fmt: skip
def test_a_converted_page_holds_what_a_conversion_of_each_layer_alone_makes(
    built_parts: Mapping[str, Kernels], path: str, source: str, target: str
) -> None:
    prompts = Prompts(PageShape(LAYERS, 3, 16, 64), 3, (32,), torch.bfloat16)
    of = EveryLayer.over(prompts, source, path, built_parts)
    of.run(prompts.whole())
    conversion = Conversion(KvForm(source), KvForm(target, source), prompts.shape, has_pieces=True)
    for page in of.data:
        ours = torch.full((conversion.page_bytes,), 0xAB, dtype=torch.uint8)
        convert_page(conversion, page, ours)
        for layer in range(LAYERS):
            alone, lone = PageShape(1, 3, 16, 64), []
            for form, data in ((source, page), (target, ours)):
                part = next(
                    part for part in page_form(form).parts(prompts.shape) if layer in range(LAYERS)[part.layers]
                )
                of_part = data[part.bytes].unflatten(0, (part.shape.layers, -1))
                lone.append((part.form.name, of_part[layer - part.first_layer]))
            (own, stored), (other, right) = lone
            expected = torch.empty_like(right)
            each = Conversion(KvForm(own), KvForm(other, own), alone, has_pieces=True)
            convert_page(each, stored, expected)
            assert torch.equal(right, stored if own == other else expected)


def test_exact_pages_of_unfinished_blocks_hold_the_other_layers_alone() -> None:
    prompts = Prompts(PageShape(LAYERS, 2, 16, 64), 6, (40,), torch.bfloat16)
    form = page_form("int4+2xbfloat16")
    data = torch.zeros(prompts.blocks, form.page_bytes(prompts.shape), dtype=torch.uint8)
    pool = prompts.over(data, form.name)
    assert isinstance(pool, PartedPool)
    assert [part.layers for part in pool.parts] == [2, 1, 2]
    assert pool.parts[1].exact.pool.layers == 1  # type: ignore[union-attr]  # the 4-bit part


def test_a_page_takes_the_bytes_of_its_layers_and_a_name_says_which_are_exact() -> None:
    shape, end = PageShape(30, 3, 16, 64), PageShape(2, 3, 16, 64)
    form = page_form(form_name("int4", 2, "bfloat16"))
    assert form.name == "int4+2xbfloat16"
    inner = PageShape(26, 3, 16, 64)
    assert form.page_bytes(shape) == 2 * FORMS["bfloat16"].page_bytes(end) + FORMS["int4"].page_bytes(inner)
    assert page_form(form_name("int4", 0, "bfloat16")) is FORMS["int4"]


@pytest.mark.parametrize("exact_layers", [15, 16, 10**9])
def test_a_model_without_layers_between_the_ends_is_refused(exact_layers: int) -> None:
    form = page_form(form_name("int4", exact_layers, "bfloat16"))
    with pytest.raises(ConfigError, match=r"of this model's 30 layers to int4: give at most 14, or --kv-format bfl"):
        form.page_bytes(PageShape(30, 3, 16, 64))
