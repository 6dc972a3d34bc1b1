"""Compares what a model of transformers computes over our pages with what it computes without them, before it serves.

A short prompt runs three times: with transformers' own attention, whole over pages, and in chunks. The last chunk runs
together with another prompt, over pages that were moved as pages of a prefill worker are.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.config import ModelConfig
from twostroke.engine.determinism import Determinism
from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch, RaggedPlaces
from twostroke.kernels.pools.parted_pool import AnyPool, parts_of
from twostroke.kernels.products.steady import cancelling_rows, cancelling_weight
from twostroke.kv_cache.form import FORMS
from twostroke.kv_cache.layout import SCRATCH_PAGES
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.decoders.choice import LoadOptions
from twostroke.models.decoders.transformer import Model
from twostroke.models.generic.checkpoint import load_checkpoint
from twostroke.models.generic.paged_model import PagedModel
from twostroke.models.spec import ModelSpec

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

TRIED_TOKENS: Final = 53
"""Tokens of the prompt: some blocks and a tail."""
FIRST_CUTS: Final = (1, 8)
"""Ends of the first chunks in tokens: one row, and few."""
COMPANY: Final = 17
"""Rows of the other prompt in the step of the last chunk."""
COMPARED_ROWS: Final = (1, 2, 4, 8, 17, 33, 64, 128)
"""Numbers of rows whose products are compared with those of `MOST_ROWS`."""
MOST_ROWS: Final = 256
MOST_OUTPUTS: Final = 4096
"""Outputs of a product that are compared at most: a head's would take gigabytes, and change no choice of a kernel."""


@dataclass(frozen=True, slots=True)
class Distances:
    """How far two computations of a prompt's outputs are from each other: the norm of their difference, over that of
    the second one's outputs less their mean."""

    plain: float
    """Distance of the whole prompt over pages from transformers' own attention."""
    split: float
    """Distance of the prompt in chunks over moved pages from the whole prompt over pages."""
    has_same_bits: bool
    """Whether pages and outputs of the chunks are those of the whole prompt to the bit, and products always are."""


class GenericCode:
    """Loads and tries models that run by the code of transformers. See `twostroke.engine.extras.ForeignCode`."""

    def load(self, directory: Path, spec: ModelSpec, backend: AttentionBackend, options: LoadOptions) -> Model:
        if options.is_int8:
            raise ConfigError(
                f"--weights int8 is not computed for {spec.architecture}, which transformers runs; "
                "leave --weights away to serve the weights as they are",
                field="weights",
            )
        model, _ = load_checkpoint(directory, options.dtype, with_head=options.with_head)
        return PagedModel(model, spec, backend, options.dtype)

    def tried(
        self,
        model: Model,
        memory: PageMemory,
        angles: tuple[torch.Tensor, torch.Tensor],
        spec: ModelSpec,
        config: ModelConfig,
        pool: AnyPool,
    ) -> Determinism:
        """Tries a loaded model over the pages of a pool. No page may be held yet.

        Raises UnsupportedModel where pages lead to other outputs than plain attention, ConfigError where bits that
        --deterministic promises differ.
        """
        assert isinstance(model, PagedModel)
        name, forms = spec.architecture, (FORMS[config.dtype], *(part.form for part in parts_of(pool)))
        found = measured(model, memory, angles, block_size=pool.block, vocab=spec.vocab_size)
        bound = max(form.largest_distance for form in forms)  # by the coarser of dtype and pages
        log.info(
            "generic model tried model=%s plain_distance=%.1e split_distance=%.1e bound=%.1e same_bits=%s",
            name,
            found.plain,
            found.split,
            bound,
            found.has_same_bits,
        )
        if not max(found.plain, found.split) <= bound:  # raised for NaN, too
            raise UnsupportedModel(
                f"{name} is not served: over pages its outputs are {found.plain:.1e} from those of transformers' own "
                f"attention, and {found.split:.1e} in chunks from whole; {bound:.1e} would be rounding",
                field="model",
            )
        if config.deterministic and not found.has_same_bits:
            raise ConfigError(
                f"--deterministic cannot be kept: {name} runs in transformers' code, where a prompt has other bits in "
                "chunks beside another one than alone; leave --deterministic away",
                field="deterministic",
            )
        return Determinism(
            found.has_same_bits,
            f"transformers' code, tried at start: {found.plain:.1e} from plain attention, {found.split:.1e} in chunks "
            "from whole",
        )


def measured(
    model: PagedModel,
    memory: PageMemory,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    block_size: int,
    vocab: int,
) -> Distances:
    """Runs the prompt three times. `angles` are the cosines and sines of all positions."""
    fitting = min(len(region) - SCRATCH_PAGES for region in memory.regions) // 2
    count = min(TRIED_TOKENS, fitting * block_size, len(angles[0]))
    trial = _Trial(model, memory.regions, angles, block_size, -(-count // block_size))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, count))
    plain = model.plain_outputs(tokens)
    trial.clear()
    whole = trial.run(tokens, 0, count, first_page=0)
    written = trial.pages_from(0)

    trial.clear()
    moved = count // 2 // block_size
    cuts = [0, *(cut for cut in FIRST_CUTS if cut < moved * block_size), moved * block_size]
    parts = [trial.run(tokens, start, end, first_page=0) for start, end in itertools.pairwise(cuts) if start < end]
    trial.move(moved)
    parts.append(trial.run(tokens, cuts[-1], count, first_page=trial.pages, company=min(COMPANY, count)))
    split = torch.cat(parts)
    same = all(map(np.array_equal, trial.pages_from(trial.pages), written)) and torch.equal(split, whole)
    return Distances(_distance(whole, plain), _distance(split, whole), same and _are_steady(model))


def _are_steady(model: PagedModel) -> bool:
    """Returns whether products of the model's shapes give a row the same bits among few rows and among many.

    The prompt alone does not show it: most sums that differ are rounded to the same number of 16 bits.
    """
    kinds = {(min(len(each.weight), MOST_OUTPUTS), each.in_features, each.weight.dtype) for each in model.products()}
    for outputs, inputs, dtype in kinds:
        weight, rows = (
            cancelling_weight(torch.empty(outputs, inputs, dtype=dtype)),
            cancelling_rows(MOST_ROWS, inputs, dtype),
        )
        whole = functional.linear(rows, weight)
        if not all(torch.equal(functional.linear(rows[:count], weight), whole[:count]) for count in COMPARED_ROWS):
            return False
    return True


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    some, others = some.double(), others.double()
    centred = others - others.mean(dim=-1, keepdim=True)
    return float((some - others).norm() / centred.norm())


@dataclass(frozen=True, slots=True)
class _Trial:
    model: PagedModel
    regions: Sequence[Bytes]
    """The pages of each page group; the last is the scratch page."""
    angles: tuple[torch.Tensor, torch.Tensor]
    block_size: int
    pages: int
    """Pages of the prompt, in each group."""

    def clear(self) -> None:
        """Fills the pages of both places that the prompt has with zeros."""
        for region in self.regions:
            region[: 2 * self.pages] = 0

    def move(self, count: int) -> None:
        """Copies the first pages of the first place to the second."""
        for region in self.regions:
            region[self.pages : self.pages + count] = region[:count]

    def pages_from(self, first: int) -> list[Bytes]:
        return [region[first : first + self.pages].copy() for region in self.regions]

    def run(self, tokens: torch.Tensor, start: int, end: int, *, first_page: int, company: int = 0) -> torch.Tensor:
        """Returns the outputs of tokens [start, end), whose pages are `first_page` and the next.

        `company` tokens of another prompt come before them in the step; they go to the scratch page.
        """
        positions = torch.cat([torch.arange(company), torch.arange(start, end)])
        rows = torch.tensor([0] * company + [1] * (end - start))
        contexts: tuple[int, ...] = (company, end)
        places = [self._places(positions, rows, first_page, len(region) - SCRATCH_PAGES) for region in self.regions]
        batch = RaggedBatch(
            positions=positions.int(),
            query_starts=(0, *([company] if company else []), company + end - start),
            context_lens=contexts if company else contexts[1:],
            block_tables=places[0].block_tables,
            write_slots=places[0].write_slots,
            cosines=self.angles[0][positions],
            sines=self.angles[1][positions],
            further=tuple(places[1:]),
        )
        return self.model.outputs(torch.cat([tokens.flip(0)[:company], tokens[start:end]]), batch)[company:]

    def _places(self, positions: torch.Tensor, rows: torch.Tensor, first_page: int, scratch: int) -> RaggedPlaces:
        own = range(first_page, first_page + self.pages)
        tables = torch.tensor([[scratch] * self.pages, list(own)], dtype=torch.int32)
        slots = tables[rows, positions // self.block_size] * self.block_size + positions % self.block_size
        return RaggedPlaces(tables[int(rows[0]) :].contiguous(), slots.long())
