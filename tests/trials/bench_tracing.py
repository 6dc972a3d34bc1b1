"""What spans cost: `python -m tests.trials.bench_tracing`. A request's worth of them, made and kept, without and
with a collector's queue."""

from __future__ import annotations

import argparse
import time

from twostroke.tracing.recorder import Exporter, Recorder
from twostroke.tracing.span import Span

REQUESTS = 5000


class Queue:
    """A queue that costs as much as a request pays for a collector: the rest is another thread's."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        """Nothing is pending."""


def seconds(exporter: Exporter | None) -> float:
    recorder = Recorder("router-0", exporter=exporter)
    begun_s = time.process_time()
    for number in range(REQUESTS):
        root = recorder.root("request", f"r{number}~0123456789abcdef", "")
        root.begin("prepare").end()
        answer = recorder.begin("answer", f"r{number}~0123456789abcdef#0", root.context)
        route = answer.begin("route")
        route.set(**{f"forecast.part_{index}": 0.5 for index in range(20)})
        route.end()
        for name in ("attempt", "queue", "pull", "prefill", "queue", "chunk", "chunk", "decode"):
            part = recorder.begin(name, f"r{number}~0123456789abcdef#0", answer.context)
            part.set(tokens=1, pages=2, bytes=3)
            part.end()
        answer.end()
        root.end()
    return (time.process_time() - begun_s) / REQUESTS


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.trials.bench_tracing", description=__doc__).parse_args()
    print(f"no collector: {seconds(None) * 1e6:.0f} us a request, over all processes")
    print(f"a collector: {seconds(Queue()) * 1e6:.0f} us a request, without its thread")
