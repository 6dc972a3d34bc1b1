"""A real run, and its replay in the simulator, side by side: times from the decision to the first token, and hits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.simulate.fit.fitting import read_log
from tools.simulate.fleet.results import SimulatedRun, percentile, token_hit_rate
from tools.simulate.reports.report import percent, seconds
from tools.simulate.traces.formats import is_record
from tools.tables import table_of, text_grid, text_row
from twostroke.observability.request_log import AnswerRecord

SHARES = (0.5, 0.9)
SINCE_DECISION = "from the decision to the first token, simulated over real"


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Times from the decision to the first token, of a real run and of its replay."""

    policy: str
    requests: int
    real_s: tuple[float | None, ...]
    """At each of `SHARES`."""
    simulated_s: tuple[float | None, ...]
    real_hits: float | None = None
    """Share of prompt tokens that were not computed; None where the run does not say."""
    simulated_hits: float | None = None

    @property
    def ratios(self) -> tuple[float | None, ...]:
        return tuple(b / a if a and b is not None else None for a, b in zip(self.real_s, self.simulated_s, strict=True))


def real_answers(path: str | None, limit: int | None) -> tuple[AnswerRecord, ...]:
    """Returns the first `limit` answers of a request log that is replayed; none of any other trace."""
    if path is None or not _is_log(Path(path)):
        return ()
    rows = [answer for answer in read_log(Path(path)).answers if answer.output_tokens]
    return tuple(answer for answer in rows[:limit] if answer.ttft_s is not None)


def policies_of(answers: Sequence[AnswerRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer.policy for answer in answers))


def likeness(answers: Sequence[AnswerRecord], run: SimulatedRun) -> Likeness:
    """Compares the answers that the run's policy placed with the simulated ones."""
    real = [answer.ttft_s for answer in answers if answer.policy == run.policy and answer.ttft_s is not None]
    simulated = [outcome.since_decision_s for outcome in run.outcomes if outcome.since_decision_s is not None]
    return Likeness(
        policy=run.policy,
        requests=len(real),
        real_s=tuple(percentile(real, share) for share in SHARES),
        simulated_s=tuple(percentile(simulated, share) for share in SHARES),
        real_hits=_hit_rate([answer for answer in answers if answer.policy == run.policy]),
        simulated_hits=token_hit_rate(run),
    )


def _hit_rate(answers: Sequence[AnswerRecord]) -> float | None:
    asked = sum(answer.prompt_tokens for answer in answers)
    return sum(answer.cached_tokens for answer in answers) / asked if asked else None


def print_likeness(found: Sequence[Likeness], title: str, console: Console) -> None:
    times = ("real p50", "simulated", "ratio", "real p90", "simulated", "ratio")
    headings = ("policy", "answers", *times, "real hits", "simulated")
    rows = []
    for each in found:
        cells = zip(each.real_s, each.simulated_s, each.ratios, strict=True)
        shown = [(seconds(real), seconds(simulated), _times(ratio)) for real, simulated, ratio in cells]
        hits = (percent(each.real_hits), percent(each.simulated_hits))
        rows.append(text_row(each.policy, str(each.requests), *(cell for group in shown for cell in group), *hits))
    console.print(table_of(text_grid(headings, rows), title))


def likeness_json(found: Sequence[Likeness]) -> list[dict[str, Any]]:
    return [
        {
            "policy": each.policy,
            "answers": each.requests,
            "hits": {"real": each.real_hits, "simulated": each.simulated_hits},
            **{
                f"p{100 * share:g}": {"real_s": real, "simulated_s": simulated, "ratio": ratio}
                for share, real, simulated, ratio in zip(
                    SHARES, each.real_s, each.simulated_s, each.ratios, strict=True
                )
            },
        }
        for each in found
    ]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}x"


def _is_log(path: Path) -> bool:
    with path.open(encoding="utf-8-sig") as lines:
        first = next((line.strip() for line in lines if line.strip()), "")
    return first.startswith("{") and is_record(json.loads(first))
