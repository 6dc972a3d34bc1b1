"""Three times what the cluster can do, for seconds; `python -m tests.trials.bench overload` does it for minutes."""

from __future__ import annotations

import argparse

from tests.cluster.processes import running_cluster
from tests.trials.bench.overload.options import add_arguments, options_from
from tests.trials.bench.overload.session import measure
from tests.trials.bench.overload.verdict import End
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig

PACED = ModelConfig(model="paced:step_ms=40,prefill_tokens_per_s=4000,max_model_len=512", served_model_name="tiny")
SMALL = CacheConfig(kv_cache_memory_bytes=28 * 16_384)
"""Four answers of 66 to 96 tokens begin in it, and grow beyond it."""
CAPACITY_PER_S = 3.5
"""Four answers at once, of 30 steps each; what the cluster does then is a little less."""


async def test_three_times_too_much_is_refused_soon_and_what_outgrows_the_pool_goes_on() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    schedule = ScheduleConfig(max_num_seqs=5, max_num_batched_tokens=128)
    async with running_cluster(prefill=1, decode=1, model=PACED, cache=SMALL, schedule=schedule) as cluster:
        told = f"grpc://{cluster.grpc} --capacity {CAPACITY_PER_S} --loads 3 --duration 7 --timeout 3.4"
        _, (run,) = await measure(
            options_from(parser.parse_args([*told.split(), "--prompt-tokens", "66", "--output-tokens", "30"]))
        )
        assert not run.failures
        assert run.ends[End.MET]
        assert run.ends[End.REFUSED] > 2 * CAPACITY_PER_S
        assert run.refusal_over_ttft is not None
        assert run.refusal_over_ttft < 0.5
        assert cluster.metric("decode-0", "twostroke_preemptions_total") > 0, "answers should outgrow the pool"
        await cluster.assert_quiet()
