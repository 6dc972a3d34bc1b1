"""All targets in turns for as long as told: `python -m tests.trials.chaos.fuzz --for 3600`. Not zero where anything
broke."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.trials.chaos.fuzz.targets import TARGETS
from tests.trials.chaos.program import seconds

_OPENING_S = 300.0
"""For a target's imports, and for libFuzzer to read its corpus and to end, on a machine that does other things."""


@dataclass(frozen=True, slots=True)
class Turn:
    target: str
    tries: int
    seconds: float
    is_led: bool
    """Coverage leads the changes."""
    words: str
    """Words of a turn that broke something: the end of what it said."""


def main() -> int:
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m tests.trials.chaos.fuzz", description=__doc__)
    parser.add_argument("--for", dest="seconds", type=seconds, default=60.0, help="in all: 90s, 30m, 1h")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--at-once", type=int, default=1, help="targets side by side; each then plays that much longer")
    parser.add_argument("--finds", type=Path, default=Path(".fuzz"), help="where inputs that break something are left")
    wanted = parser.parse_args()
    share_s = wanted.seconds * wanted.at_once / len(wanted.only)
    print(f"{len(wanted.only)} targets, {share_s:.0f} s each, seed {wanted.seed}", flush=True)
    with ThreadPoolExecutor(wanted.at_once) as turns:
        ended = list(turns.map(lambda name: _turn(name, share_s, wanted.seed, wanted.finds), wanted.only))
    for turn in ended:
        led = "led by coverage" if turn.is_led else "by chance"
        print(f"{turn.target:16} {turn.tries:>10} tries in {turn.seconds:6.0f} s, {led}{': BROKEN' * bool(turn.words)}")
    broken = [turn for turn in ended if turn.words]
    for turn in broken:
        print(f"\n== {turn.target}\n{turn.words}")
    print(f"{sum(turn.tries for turn in ended)} tries, {len(broken)} targets broken; inputs are in {wanted.finds}")
    return 1 if broken else 0


def _turn(name: str, seconds: float, seed: int, finds: Path) -> Turn:
    command = [
        sys.executable,
        "-m",
        "tests.trials.chaos.fuzz.engine",
        name,
        "--for",
        str(seconds),
        "--seed",
        str(seed % 2**31),
    ]
    started = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, "--finds", str(finds)],
            capture_output=True, text=True, errors="replace", timeout=seconds + _OPENING_S, check=False,
        )  # fmt: skip
        said, errors, code = ended.stdout, ended.stderr, ended.returncode
    except subprocess.TimeoutExpired as late:
        said, errors, code = _text(late.stdout), _text(late.stderr) + "\nit hangs", 124
    told = [json.loads(line) for line in said.splitlines() if line.startswith('{"target"')]
    last = told[-1] if told else {"tries": 0, "coverage": False}
    took_s = time.monotonic() - started
    print(f"{name} {last['tries']} tries, exit status {code}", flush=True)
    return Turn(name, last["tries"], took_s, last["coverage"], (errors[-6000:] or "no word") if code else "")


def _text(captured: bytes | str | None) -> str:
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


if __name__ == "__main__":
    sys.exit(main())
