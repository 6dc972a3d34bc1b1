"""What a model predicts over pages of one form, and how far that is from what it predicts over pages of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from tests.trials.bench.forms.form_model import BLOCK, CHUNK, FormModel
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kv_cache.form import Conversion


class Predicts(Protocol):
    def log_probabilities(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields float32 [positions, vocab] of what follows each position, chunk by chunk."""


class ConvertedModel:
    """The model over pages of one form, where those of all earlier chunks were computed in another and converted."""

    def __init__(self, source: FormModel, target: FormModel, conversion: Conversion) -> None:
        self._source = source
        self._target = target
        self._conversion = conversion

    def log_probabilities(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        chunks = zip(self._source.log_probabilities(tokens), self._target.log_probabilities(tokens), strict=True)
        for number, (_, found) in enumerate(chunks):
            yield found
            for block in range(number * CHUNK // BLOCK, min((number + 1) * CHUNK, len(tokens)) // BLOCK):
                convert_page(self._conversion, self._source.data[block], self._target.data[block])


@torch.inference_mode()
def compare(exact: Predicts, others: Mapping[str, Predicts], windows: list[torch.Tensor]) -> dict[str, list[float]]:
    """Returns [negative log likelihood, KL, same], each a mean over all positions, of "" (the exact one) and others."""
    sums = {name: [0.0, 0.0, 0.0] for name in ("", *others)}
    positions = 0
    for window in windows:
        streams = {name: model.log_probabilities(window) for name, model in (("", exact), *others.items())}
        for start in range(0, len(window), CHUNK):
            following = window[start + 1 : start + 1 + CHUNK]
            chunks = {name: next(stream)[: len(following)] for name, stream in streams.items()}
            truth = chunks[""]
            positions += len(following)
            for name, found in chunks.items():
                own = sums[name]
                own[0] -= float(found.gather(1, following[:, None]).sum())
                own[1] += _kl(truth, found)
                own[2] += float((found.argmax(1) == truth.argmax(1)).sum())
    return {name: [each / positions for each in own] for name, own in sums.items()}


def _kl(truth: torch.Tensor, found: torch.Tensor) -> float:
    """Returns the sum of the rows' KL divergences, in nats. Float32 rows sum to 1 only nearly, which would show
    here."""
    own, other = (each.double().log_softmax(1) for each in (truth, found))
    return max(0.0, float((own.exp() * (own - other)).sum()))
