"""Whole steps: a small model's equal to the reference's, and an 8B-shaped model's against its byte floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from tests.trials.gpu.kernels import relative_error
from tests.trials.gpu.measure import DEVICE, ON_GPU, free_bytes, median_ms
from tests.trials.gpu.report import Report, Row
from tests.trials.gpu.shapes import BLOCK, LLAMA_8B, SMALL, TINY, RandomSource, decode_batch, scattered_tables
from tests.unit.engine.batches import Stream, step
from tests.unit.engine.reference_attention import reference_kernels
from twostroke.engine.backends.cuda.accelerator import accelerator_for
from twostroke.engine.backends.cuda.plan import DeviceKernels, DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.products.device_linear import DeviceLinears
from twostroke.kernels.triton.attention import TritonAttention
from twostroke.kernels.triton.codes import TritonCodeProducts
from twostroke.kernels.triton.elementwise import TritonElementwise
from twostroke.kernels.triton.grouped import TritonGrouped
from twostroke.kv_cache.form import FORMS
from twostroke.models.spec import ModelSpec
from twostroke.scheduler.batch import Batch

STEP_OVER_FLOOR = 1.3
JUDGED_BATCH = 64
STEPS = [(batch, context) for batch in (1, 16, 64) for context in (2048, 8192)] if ON_GPU else [(2, 32), (3, 64)]
TIMED_SPEC, TIMED_DTYPE = (LLAMA_8B, "bfloat16") if ON_GPU else (TINY, "float32")
TIMED_RUNS = 30 if ON_GPU else 4
PROMPTS = (70, 3, 33, 16, 48) if ON_GPU else (20, 3, 17)
CHECKED_STEPS = 12 if ON_GPU else 3
WORST_LOGITS = 1e-4


def plan_for(spec: ModelSpec, dtype: str, *, sequences: int, length: int, tokens: int) -> DevicePlan:
    return DevicePlan(
        spec=spec,
        device=DEVICE,
        dtype=dtype,
        form=FORMS[dtype],
        block_size=BLOCK,
        max_model_len=length,
        max_tokens=tokens,
        max_sequences=sequences,
        with_head=True,
    )


def runner_for(plan: DevicePlan, pages: torch.Tensor, seed: int = 0) -> DeviceRunner:
    """Random weights over given pages; on the CPU with the reference in the kernels' place."""
    source = RandomSource.seeded(seed, plan.device, plan.torch_dtype, plan.device)
    kernels_over = DeviceKernels.over if ON_GPU else reference_kernels
    return make_device_runner(plan, source, [pages], accelerator_for(plan.device), kernels_over)


def empty_pages(plan: DevicePlan, count: int) -> torch.Tensor:
    return torch.zeros((count + 1, plan.needs().page_bytes), dtype=torch.uint8, device=plan.device)


def check_steps(_report: Report) -> Iterator[Row]:
    """Greedy float32 streams of a small model: recorded steps of Triton's kernels against the reference on the CPU."""
    spec = SMALL if ON_GPU else TINY
    plan = plan_for(spec, "float32", sequences=len(PROMPTS), length=128, tokens=128 if ON_GPU else 32)
    on_cpu = replace(plan, device=torch.device("cpu"))
    right, right_logits = _serve(_checked_runner(on_cpu, reference_kernels), spec, recorded=False)
    for recorded, how in ((True, "recorded steps"), (False, "single launches")):
        tokens, logits = _serve(_checked_runner(plan, triton_kernels), spec, recorded=recorded)
        same = sum(a == b for a, b in zip(tokens, right, strict=True))
        error = relative_error(logits, right_logits)
        passed = same == len(PROMPTS) and error <= WORST_LOGITS
        yield Row(f"{how}, streams as the reference's", f"{same} of {len(PROMPTS)}, error {error:.0e}", passed=passed)


def triton_kernels(pool: PagePool, spec: ModelSpec, dtype: torch.dtype) -> DeviceKernels:
    """Compiled on a GPU, else interpreted."""
    attention = TritonAttention(pool, spec.heads, spec.rules, dtype, has_sinks=spec.has_sinks)
    elementwise = TritonElementwise()
    linears = DeviceLinears(DEVICE, elementwise, TritonCodeProducts())
    return DeviceKernels(attention, elementwise, TritonGrouped(), linears)


def _checked_runner(plan: DevicePlan, kernels_over: Callable[[torch.Tensor, ModelSpec], DeviceKernels]) -> DeviceRunner:
    """Weights are drawn on the CPU, so that they are the same everywhere."""
    source = RandomSource.seeded(0, plan.device, torch.float32, torch.device("cpu"))
    pages = empty_pages(plan, 8 * len(PROMPTS))
    return make_device_runner(plan, source, [pages], accelerator_for(plan.device), kernels_over)


def _serve(runner: DeviceRunner, spec: ModelSpec, *, recorded: bool) -> tuple[list[list[int]], torch.Tensor]:
    """Prompts chunk by chunk, then decode steps of five, three and one sequence in turn; the last step's logits."""
    random = np.random.default_rng(1)
    streams = [
        Stream(random.integers(0, spec.vocab_size, count).tolist(), list(range(8 * row, 8 * row + 8)))
        for row, count in enumerate(PROMPTS)
    ]
    for stream in streams:
        stream.computed = len(stream.tokens) - 1
        runner.run(step([(Stream(stream.tokens, stream.pages), stream.computed)], BLOCK))
    for turn in range(CHECKED_STEPS):
        active = [streams, streams[1:4], streams[2:3]][turn % 3]
        batch = step([(stream, 1) for stream in active], BLOCK)
        launched = runner.launch(batch) if recorded else None
        logits = launched.logits[: len(active)].clone() if launched else runner.logits(batch)
        assert logits is not None
        for stream, token in zip(active, logits.argmax(dim=-1).tolist(), strict=True):
            stream.tokens.append(token)
            stream.computed += 1
    return [stream.tokens for stream in streams], logits


def step_speed(report: Report) -> Iterator[Row]:
    """Whole decode steps, packing and the way back included, over (weights + KV read) / copy bandwidth."""
    spec = TIMED_SPEC
    longest = max(context for _, context in STEPS)
    plan = plan_for(spec, TIMED_DTYPE, sequences=JUDGED_BATCH, length=longest + BLOCK, tokens=512)
    needs = plan.needs()
    room = (free_bytes() - needs.weight_bytes - needs.working_bytes) // needs.page_bytes - 1
    wanted = max(batch * context for batch, context in STEPS) // BLOCK
    if room < STEPS[0][1] // BLOCK:
        report.not_run.append("step of an 8B-shaped model: its weights do not fit this GPU")
        return
    pages = torch.empty((min(room, wanted) + 1, needs.page_bytes), dtype=torch.uint8, device=DEVICE)
    for part in pages.view(plan.torch_dtype).split(256):
        part.normal_()
    runner = runner_for(plan, pages)
    embedding_bytes = spec.vocab_size * spec.hidden_size * plan.torch_dtype.itemsize
    read_bytes = needs.weight_bytes - embedding_bytes  # one row per token of the embedding
    for batch, context in STEPS:
        blocks = context // BLOCK
        if batch * blocks > room:
            report.not_run.append(f"8B step batch {batch} context {context}: its pages do not fit this GPU")
            continue
        tables = scattered_tables(batch, blocks)
        made = decode_batch([context] * batch, tables, spec.vocab_size)
        whole_ms = _wall_ms(runner, made)
        # Packed while the last copy may be under way, but the bytes are the same.
        device_ms = median_ms(lambda made=made: runner.launch(made))  # type: ignore[misc]
        kv_bytes = batch * context * needs.page_bytes // BLOCK
        floor_ms = (read_bytes + kv_bytes) / report.ceilings["copy"] * 1e3
        ratio, judged = whole_ms / floor_ms, batch == JUDGED_BATCH
        yield Row(
            f"8B step, batch {batch}, context {context}",
            f"{whole_ms:.2f} ms ({device_ms:.2f} on GPU)",
            ratio,
            f"<= {STEP_OVER_FLOOR:.2f}" if judged else "of floor",
            ratio <= STEP_OVER_FLOOR if judged else None,
        )
    runner.close()


def _wall_ms(runner: DeviceRunner, batch: Batch) -> float:
    times = []
    for _ in range(TIMED_RUNS):
        began_s = time.perf_counter()
        result = runner.run(batch)
        times.append((time.perf_counter() - began_s) * 1e3)
        assert len(result.tokens) == batch.sequences
    return statistics.median(times[3:])
