"""Check and time everything that runs on a GPU, in one command: `make gpu`, or `python -m tests.trials.gpu.bench`.

Needs torch, Triton, numpy and pydantic alone. Without a GPU, what can be run on a CPU is: kernels in Triton's
interpreter, steps and the split run with the reference in their place. The last lines are a short table; the exit
status is 1 where something failed or missed its mark. With OUT set to a folder, gpu.json is written there. A kernel
that harms its process takes the later sections along: name them (`make gpu ARGS="decode split"`) to run them by
themselves."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

GPU_SECTIONS = (
    "copy and matmul ceilings",
    "decode attention over copy bandwidth",
    "prefill attention over matmul rate",
    "decode, store and prefill of int4 pages",
    "products of stored codes",
    "step of an 8B-shaped model over its byte floor",
    "kernels as compiled, CUDA graphs, CUDA IPC, NCCL",
)


def main(wanted: Sequence[str]) -> int:
    """`wanted`: how the names of sections begin that are to run; all of them where there are none."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below
        torch.set_num_threads(1)  # for shapes this small, more only get in each other's way
        os.environ["OMP_NUM_THREADS"] = "1"  # for the process that prefills
    from tests.trials.gpu import (
        attention,
        codes,
        draws,
        experts,
        kernels,
        measure,
        model,
        nibbles,
        ranks,
        report,
        rules,
        split,
    )

    facts = environment(has_gpu)  # now, since a device that has failed may not answer later
    findings = report.Report(wanted=tuple(wanted))
    with torch.inference_mode():
        findings.section("kernels against their references", kernels.check_kernels)
        findings.section("attention rules", rules.check_rules)
        findings.section("experts", experts.check_experts)
        findings.section("stored codes", codes.check_codes)
        findings.section("int4 pages against torch", nibbles.check_nibbles)
        findings.section("recorded steps", model.check_steps)
        findings.section("draws", draws.check_draws)
        # Without a GPU the timing is rehearsed at toy sizes, so that it does not fail where a GPU is paid for.
        speeds = findings if has_gpu else report.Report(wanted=findings.wanted, is_rehearsal=True)
        speeds.section("ceilings", measure.ceilings, is_needed=True)
        speeds.section("decode attention", attention.decode_speed)
        speeds.section("prefill attention", attention.prefill_speed)
        speeds.section("int4 attention", nibbles.nibble_speed)
        speeds.section("speed of stored codes", codes.codes_speed)
        speeds.section("8B-shaped step", model.step_speed)
        if not has_gpu:
            findings.failures += [f"rehearsal of {failure}" for failure in speeds.failures]
            findings.not_run += [f"{name}: no GPU here" for name in GPU_SECTIONS]
        findings.section("ranks", ranks.check_ranks)
        findings.section("split run", split.split_run)
    findings.print_table(", ".join(facts.values()))
    if out := os.environ.get("OUT"):
        findings.write_json(Path(out) / "gpu.json", facts)
    return findings.exit_code


def environment(has_gpu: bool) -> dict[str, str]:
    import triton

    return {
        "device": torch.cuda.get_device_name() if has_gpu else "no GPU",
        "python": f"Python {platform.python_version()}",
        "torch": f"torch {torch.__version__}",
        "triton": f"Triton {triton.__version__}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.gpu.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wanted", nargs="*", metavar="SECTION", help="how the names of sections begin (default: all)")
    sys.exit(main(parser.parse_args().wanted))
