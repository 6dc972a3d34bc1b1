"""Text that one process has tokenized is found by the others, through their router, and within what it may keep."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.metrics import RouterMetrics
from router.preparation.prepare import prepare
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.preparer import INLINE_BYTES, SMALL_BYTES, ProcessPreparer
from router.preparation.wire import BrokenMessage
from router.requests.work import PreparationOutcome, SegmentQuery, Segments, Work
from router.tenant_cache import ENTRY_BYTES, TENANT_BYTES
from router.text.tokenizer import ByteText, load_text
from tests.unit.router.conftest import FACTS
from twostroke.base.errors import InvalidRequest

LONG_FACTS = dataclasses.replace(FACTS, max_model_len=1 << 20, pool_tokens=1 << 20, vocab_size=1 << 20)


@contextlib.asynccontextmanager
async def preparing(model_dir: Path, most_bytes: int) -> AsyncIterator[tuple[ProcessPreparer, RouterMetrics]]:
    metrics = RouterMetrics()
    prepares = ProcessPreparer(load_text(str(model_dir)), str(model_dir), PreparedTexts(most_bytes, metrics))
    task = asyncio.create_task(prepares.run())
    try:
        yield prepares, metrics
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def value_of(metrics: RouterMetrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"twostroke_text_cache_{name}", {"role": "router"}) or 0.0


def chat(turns: int, chars: int) -> Work:
    said = "the ship of the fleet "
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": said * (chars // len(said))} for turn in range(turns)
    ]
    body = json.dumps({"messages": messages}).encode()
    return Work("/v1/chat/completions", body, "toy", LONG_FACTS, tenant="acme")


async def test_a_chat_that_grows_from_process_to_process_is_tokenized_once(smollm2_dir: Path) -> None:
    async with preparing(smollm2_dir, 1 << 20) as (prepares, metrics):
        text = load_text(str(smollm2_dir))
        small, large = chat(9, 5_000), chat(41, 5_000)
        assert INLINE_BYTES < len(small.body) < SMALL_BYTES < len(large.body)
        for work in (small, large, dataclasses.replace(small, tenant="other"), large):
            outcome = await prepares.prepare(work, "")
            assert outcome.learned is None, "the router keeps it"
            assert outcome.value == prepare(work, text).value
        assert (value_of(metrics, "hits_total"), value_of(metrics, "misses_total")) == (2, 2)
        tokens = len(prepare(small, text).value.prompts[0].ids) + len(prepare(large, text).value.prompts[0].ids)
        assert 0.95 * tokens < value_of(metrics, "tokens_total") < tokens
        assert 4 * tokens < value_of(metrics, "bytes") < 1 << 20


async def test_nothing_is_asked_for_where_nothing_is_kept(smollm2_dir: Path) -> None:
    async with preparing(smollm2_dir, 0) as (prepares, metrics):
        for _ in range(2):
            assert (await prepares.prepare(chat(5, 5_000), "")).error is None
        assert value_of(metrics, "hits_total") == value_of(metrics, "misses_total") == 0


def test_work_of_nobody_finds_nothing() -> None:
    texts = PreparedTexts(1 << 20, RouterMetrics())
    work = Work("shared_prefix", b"", "toy", FACTS)
    assert texts.known_to(work) is None
    assert texts.keyed(work).text_key == b""


def test_each_tenant_has_a_key_of_its_own_which_no_other_router_has() -> None:
    routers = [PreparedTexts(1 << 20, RouterMetrics()) for _ in range(2)]
    works = [Work("tokenize", b"", "toy", FACTS, tenant=tenant) for tenant in ("", "a", "b")]
    assert len({texts.keyed(work).text_key for texts in routers for work in works}) == 6


def test_a_process_finds_and_teaches_only_what_belongs_to_the_tenant_of_its_request() -> None:
    texts = PreparedTexts(1 << 20, RouterMetrics())
    ours, theirs = (texts.known_to(Work("tokenize", b"", "toy", FACTS, tenant=name)) for name in ("a", "b"))
    assert ours is not None
    assert theirs is not None
    key, tokens = b"k" * 16, array("I", [1, 2])
    ours.learn(PreparationOutcome(learned=Segments(key, (2,), tokens.tobytes())))
    assert ours.answer(SegmentQuery(key)) == Segments(b"", (2,), tokens.tobytes())
    assert theirs.answer(SegmentQuery(key)) == Segments(b"", (), b"")
    theirs.keep(key, array("I", [3]))
    assert list(ours.find([key, b"x" * 16])) == [tokens]


def test_nothing_is_found_behind_a_segment_that_is_gone() -> None:
    texts = PreparedTexts(1 << 20, RouterMetrics())
    known = texts.known_to(Work("tokenize", b"", "toy", FACTS, tenant="a"))
    assert known is not None
    keys, tokens = [bytes([number]) * 16 for number in range(3)], [array("I", [number]) for number in range(3)]
    for number in (0, 2):
        known.keep(keys[number], tokens[number])
    assert list(known.find(keys)) == [tokens[0]]
    assert known.answer(SegmentQuery(b"".join(keys))) == Segments(b"", (1,), tokens[0].tobytes())


@pytest.mark.parametrize("learned", [Segments(b"short", (1,), b"...."), Segments(b"k" * 16, (2,), b"....")])
def test_segments_that_fit_to_no_keys_come_from_no_process_that_can_be_used(learned: Segments) -> None:
    known = PreparedTexts(1 << 20, RouterMetrics()).known_to(Work("tokenize", b"", "toy", FACTS, tenant=""))
    assert known is not None
    with pytest.raises(BrokenMessage):
        known.learn(PreparationOutcome(learned=learned))
    with pytest.raises(BrokenMessage):
        known.answer(SegmentQuery(b"short"))


def test_tokens_beyond_the_vocabulary_are_refused_also_where_the_tokenizer_has_more() -> None:
    few = dataclasses.replace(FACTS, vocab_size=98)
    for prompt, error in (("aaa", None), ("abc", InvalidRequest), ([98], InvalidRequest), ([97], None)):
        work = Work("/v1/completions", json.dumps({"prompt": prompt}).encode(), "toy", few)
        refused = prepare(work, ByteText()).error
        assert refused is None if error is None else isinstance(refused, error)


@pytest.mark.parametrize("by_process", [True, False])
def test_a_chain_that_does_not_fit_keeps_its_beginning(by_process: bool) -> None:
    texts = PreparedTexts(10 * (ENTRY_BYTES + 4) + TENANT_BYTES, RouterMetrics())
    chains = [[b"%8d%8d" % (chain, place) for place in range(8)] for chain in range(2)]
    for chain in (*chains, *chains):
        known = texts.known_to(Work("tokenize", b"", "toy", FACTS, tenant="a"))
        assert known is not None
        new = chain[len(known.find(chain)) :]
        learned = Segments(b"".join(new), (1,) * len(new), bytes(4 * len(new)))
        for key in () if by_process else new:
            known.keep(key, array("I", [0]))
        known.learn(PreparationOutcome(learned=learned if by_process else None))
    known = texts.known_to(Work("tokenize", b"", "toy", FACTS, tenant="a"))
    assert known is not None
    assert len(known.find(chains[1])) == 8
    assert len(known.find(chains[0])) == 2
