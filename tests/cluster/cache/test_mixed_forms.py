"""Prefill and decode workers whose pages have other forms: what travels, what answers are, and what "exact" changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.cluster.processes import TOKEN, Client, ProcessCluster, running_cluster
from tests.ready_pages import pages_in
from tests.unit.engine.batches import Stream as Known
from tests.unit.engine.batches import step
from tests.unit.worker.callers import Puller
from twostroke.base.errors import FingerprintMismatch
from twostroke.base.ids import PageId
from twostroke.config import CacheConfig, ModelConfig, Role, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.build import build_runner
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kv_cache.memory import PageMemory
from twostroke.request import SampledToken, SamplingParams
from twostroke.worker.host import ReadyInfo

MODEL = ModelConfig(dtype="bfloat16")
BLOCKS, TAIL, ANSWER = 12, 5, 8
GREEDY = SamplingParams(seed=0, max_tokens=ANSWER, temperature=0, logprobs=0)
Answer = list[tuple[int, float]]


def cache(prefill: str, decode: str) -> CacheConfig:
    return CacheConfig(kv_cache_memory_bytes=64 << 20, prefill_kv_format=prefill, decode_kv_format=decode)


@contextlib.contextmanager
def engine(role: Role, formats: CacheConfig, directory: Path) -> Iterator[tuple[BuiltEngine, PageMemory]]:
    built = build_runner(WorkerConfig(role=role, worker_id="here", model=MODEL, cache=formats), directory)
    assert isinstance(built.memory, PageMemory)
    try:
        yield built, built.memory
    finally:
        built.close()


def go_on(built: BuiltEngine, tokens: list[int], computed: int) -> Answer:
    """Greedy tokens and their logprobs over pages 0, 1, ... of which the first hold `computed` tokens."""
    known = Known(list(tokens), list(range(BLOCKS + 3)), computed, GREEDY)
    answer: list[SampledToken] = []
    while len(answer) < ANSWER:
        size = len(known.tokens) - known.computed
        answer += built.runner.run(step([(known, size)])).tokens
        known.computed += size
        known.tokens.append(answer[-1].token)
    return [(each.token, each.logprob or 0.0) for each in answer]


@dataclass(frozen=True, slots=True)
class Expected:
    prompt: list[int]
    converted: Answer
    """Answer from pages that a prefill worker computed and that were converted then."""
    exact: Answer
    """Answer of a decode worker that computed everything."""
    page_bytes: tuple[int, int]
    """Bytes of a page of a prefill and of a decode worker."""


def expected_of(formats: CacheConfig, directory: Path) -> Expected:
    prompt = [504 + 31 * at % 9000 for at in range(16 * BLOCKS + TAIL)]
    with engine(Role.PREFILL, formats, directory) as (prefill, source):
        prefill.runner.run(step([(Known(prompt, list(range(BLOCKS))), 16 * BLOCKS)]))
        conversion = prefill.model.conversion
        assert conversion is not None
        with engine(Role.DECODE, formats, directory) as (decode, target):
            exact = go_on(decode, prompt, 0)
            for page in map(PageId, range(BLOCKS)):
                convert_page(conversion, *(torch.from_numpy(memory.page(page)) for memory in (source, target)))
            converted = go_on(decode, prompt, 16 * BLOCKS)
            return Expected(prompt, converted, exact, (source.page_bytes, target.page_bytes))


async def answer_of(client: Client, prompt: list[int], **options: str) -> Answer:
    stream = client.stream(prompt, max_tokens=ANSWER, temperature=0, logprobs=0, ignore_eos=True, **options)
    return [(each.token_id, each.logprob) async for response in stream for each in response.logprobs]


@pytest.mark.parametrize(
    ("prefill", "decode"), [("bfloat16", "int8"), pytest.param("fp8_e4m3", "bfloat16", marks=pytest.mark.slow)]
)
async def test_pages_are_converted_once_and_travel_small_and_exact_requests_never_get_them(
    smollm2_dir: Path, prefill: str, decode: str
) -> None:
    formats = cache(prefill, decode)
    expected = expected_of(formats, smollm2_dir)
    assert expected.converted != expected.exact, "both could not be told apart"
    async with running_cluster(
        prefill=1, decode=1, model=MODEL, model_dir=smollm2_dir, cache=formats, policy="round-robin"
    ) as cluster:
        client = Client(cluster.grpc)
        for cached in range(2):
            assert is_near(await answer_of(client, expected.prompt), expected.converted), f"cached {cached}"
            assert cluster.metric("decode-0", "twostroke_pull_bytes_total") == BLOCKS * expected.page_bytes[1]
        for _ in range(2):
            assert is_near(await answer_of(client, expected.prompt, kv_exactness="exact"), expected.exact)
        assert cluster.metric("decode-0", "twostroke_pull_bytes_total") == BLOCKS * expected.page_bytes[1]
        assert cluster.metric("decode-0", "twostroke_pull_failures_total") == 0
        assert is_near(await answer_of(client, expected.prompt, kv_exactness="any"), expected.converted)
        await _check_pulls(cluster, expected.prompt, f"{decode} from {prefill}", decode)
        assert cluster.metric("prefill-0", "twostroke_converted_pages_total") == BLOCKS
        served = [f"twostroke_converted_{bytes_}_bytes_total" for bytes_ in ("original", "sent")]
        assert [cluster.metric("prefill-0", name) for name in served] == [
            2 * BLOCKS * page_bytes for page_bytes in expected.page_bytes
        ]
        await client.close()


def is_near(ours: Answer, theirs: Answer) -> bool:
    """The same tokens and the same logprobs: clients get these as double, and workers have the same kernels."""
    return [token for token, _ in ours] == [token for token, _ in theirs] and all(
        abs(a - b) < 1e-6 for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )


async def _check_pulls(cluster: ProcessCluster, prompt: list[int], form: str, decode: str) -> None:
    """The digests of converted pages are those of the pages that lie at the decode worker; no other form is served."""
    source, target = (ReadyInfo(**cluster.workers[name].info) for name in ("prefill-0", "decode-0"))  # type: ignore[arg-type]
    blocks = prompt[: 16 * BLOCKS]
    async with (
        contextlib.aclosing(Puller(source, token=TOKEN)) as at_source,
        contextlib.aclosing(Puller(target, token=TOKEN)) as at_target,
    ):
        digests = []
        for puller, asked in ((at_source, form), (at_source, ""), (at_target, form)):
            call = puller.pull(blocks, cached_only=True, kv_form=asked)
            ready = await puller.pages(call, BLOCKS)
            digests.append({page.block: page.digest for page in pages_in(ready)})
            call.cancel()
        converted, originals, arrived = digests
        assert converted == arrived
        assert not set(converted.values()) & set(originals.values())
        for puller, asked in ((at_source, decode), (at_target, decode), (at_target, "float32")):
            refusal = await puller.refusal(puller.pull(blocks, cached_only=True, kv_form=asked))
            assert isinstance(refusal, FingerprintMismatch)
