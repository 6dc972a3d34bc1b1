"""`twostroke simulate --fit`: a profile from a real run's request log; and that run replayed beside what it was."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import file_can_be_made
from tools.output import write_text
from tools.simulate.fit import fitted, read_log
from tools.simulate.fleet.results import Run, percentile
from tools.simulate.profile import profile_text
from tools.simulate.report import console_for, seconds
from tools.simulate.traces.request_log import is_record
from twostroke.errors import ConfigError
from twostroke.request_log import AnswerRecord

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

    @property
    def ratios(self) -> tuple[float | None, ...]:
        return tuple(b / a if a and b is not None else None for a, b in zip(self.real_s, self.simulated_s, strict=True))


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--fit", type=Path, metavar="LOG", help="write --profile from a router's --request-log, and no more"
    )


def run_fit(args: argparse.Namespace) -> int:
    if args.profile is None:
        raise ConfigError("--fit needs --profile FILE: where the fitted fleet goes", field="profile")
    file_can_be_made("--profile", str(args.profile))
    shape = fitted(read_log(args.fit))
    write_text(profile_text(shape), str(args.profile))
    cost, delays = shape.cost, shape.delays
    console = console_for(None)
    console.print(
        f"{args.profile}: {shape.prefill} prefill + {shape.decode} decode workers, pages of {shape.block_size} tokens, "
        f"{1e6 * cost.prompt_token_s:.1f} us a prompt token, {1e3 * cost.step_s:.2f} ms a step, "
        f"{1e6 * cost.stream_s:.0f} us a stream, {shape.link_bytes_per_s / 1e9:.3g} GB/s; calls in ms: "
        f"frontend {1e3 * delays.frontend_s:.2f}, open {1e3 * delays.open_s:.2f}, pull {1e3 * delays.pull_s:.2f}, "
        f"token {1e3 * delays.token_s:.2f}",
        markup=False,
    )
    return 0


def real_answers(path: Path | None, limit: int | None) -> tuple[AnswerRecord, ...]:
    """Return the first `limit` answers of a request log that is replayed; none of any other trace."""
    if path is None or not _is_log(path):
        return ()
    rows = [answer for answer in read_log(path).answers if answer.output_tokens]
    return tuple(answer for answer in rows[:limit] if answer.ttft_s is not None)


def policies_of(answers: Sequence[AnswerRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer.policy for answer in answers))


def likeness(answers: Sequence[AnswerRecord], run: Run) -> Likeness:
    """Compare the answers that the run's policy placed with the simulated ones."""
    real = [answer.ttft_s for answer in answers if answer.policy == run.policy and answer.ttft_s is not None]
    simulated = [outcome.since_decision_s for outcome in run.outcomes if outcome.since_decision_s is not None]
    return Likeness(
        policy=run.policy,
        requests=len(real),
        real_s=tuple(percentile(real, share) for share in SHARES),
        simulated_s=tuple(percentile(simulated, share) for share in SHARES),
    )


def print_likeness(found: Sequence[Likeness], title: str, console: Console) -> None:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for heading in ("answers", "real p50", "simulated", "ratio", "real p90", "simulated", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in found:
        cells = zip(each.real_s, each.simulated_s, each.ratios, strict=True)
        shown = [(seconds(real), seconds(simulated), _times(ratio)) for real, simulated, ratio in cells]
        table.add_row(each.policy, str(each.requests), *(cell for group in shown for cell in group))
    console.print(table)


def likeness_json(found: Sequence[Likeness]) -> list[dict[str, Any]]:
    return [
        {
            "policy": each.policy,
            "answers": each.requests,
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
