"""What steps have lately done for each of their streams: routers predict from it how long answers take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from twostroke.scheduler.batching import Step
from twostroke.scheduler.cost import StreamStep
from twostroke.scheduler.values import Emission

MEMORY = 1024.0
"""Steps of a stream that are remembered: some answers, so that no single one decides; older ones fade."""
MOST_TOKENS = 33
"""Tokens that a step counts of one stream at most. Some answers get thousands at once: one of them would decide what is
predicted of a thousand steps of others."""


class StreamSteps:
    def __init__(self) -> None:
        self._steps = 0.0
        self._streams = 0.0
        """Streams of all steps."""
        self._rows = 0.0
        self._tokens = 0.0
        self._between_s = 0.0
        """Seconds of other work before those steps."""
        self._since_s = 0.0
        """Seconds of such work since the last step."""
        self._had_streams = False
        """The last step had streams: what is computed before the next one delays them."""

    @property
    def each(self) -> StreamStep:
        """What a step does for each of its streams, on average."""
        if not self._streams:
            return StreamStep()
        return StreamStep(self._rows / self._streams, self._tokens / self._streams, self._between_s / self._steps)

    def worked_between(self, seconds: float) -> None:
        """Notes that other work came before the next step."""
        if self._had_streams:
            self._since_s += seconds

    def observe(self, step: Step, emissions: Sequence[Emission]) -> None:
        """Counts a step and the tokens that it has made known. The first token of an answer is no stream's yet."""
        chunks = [chunk for chunk in step.chunks if chunk.samples and chunk.start >= chunk.sequence.prompt_tokens]
        self._had_streams = bool(chunks)
        if not chunks:
            return
        kept = (1.0 - 1.0 / MEMORY) ** len(chunks)
        self._steps = kept * self._steps + 1.0
        self._streams = kept * self._streams + len(chunks)
        self._rows = kept * self._rows + sum([chunk.rows for chunk in chunks])
        self._tokens *= kept
        self._between_s = kept * self._between_s + self._since_s
        self._since_s = 0.0
        streams = {chunk.sequence for chunk in chunks}
        self.became_known(emission for emission in emissions if emission.sequence in streams)

    def became_known(self, emissions: Iterable[Emission]) -> None:
        """Counts tokens of streams that have become known, some of them later than their step ended."""
        counts = Counter(emission.sequence for emission in emissions)
        self._tokens += sum(min(count, MOST_TOKENS) for count in counts.values())
