"""Every verdict from the facts that call for it, and from no others."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tools.doctor.diagnosis import CHECKS, Cause, diagnose
from tools.doctor.facts import Facts, SentChat, WorkerFacts
from twostroke.kv_cache.form import KvForm

FLEET = "model=m;revision=1;block_size=16;dtype=bfloat16"
TOKENS = tuple(range(100))
PREFILL = WorkerFacts(
    worker="prefill-0",
    role="prefill",
    state="serving",
    fingerprint=FLEET,
    event_age_s=0.1,
    own_sequence=7,
    index_sequence=7,
    held_blocks=6,
    stored_blocks=6,
)
DECODE = replace(PREFILL, worker="decode-0", role="decode")
FINE = Facts(
    block_size=16,
    vocab_size=5000,
    fingerprint=FLEET,
    kv_form=KvForm("bfloat16"),
    policy="kv",
    is_blind=False,
    workers=(PREFILL, DECODE),
    first=SentChat(salt="", tokens=TOKENS, prompt_tokens=100, cached_tokens=0),
    second=SentChat(salt="", tokens=TOKENS, prompt_tokens=100, cached_tokens=96),
)
MISSED = replace(FINE, second=replace(FINE.second, cached_tokens=0))


def workers(**changes: object) -> tuple[WorkerFacts, ...]:
    return (replace(PREFILL, **changes), replace(DECODE, **changes))  # type: ignore[arg-type]


def second(facts: Facts, **changes: object) -> Facts:
    return replace(facts, second=replace(facts.second, **changes))  # type: ignore[arg-type]


def test_reuse_of_every_full_block_is_fine_and_the_tail_is_explained() -> None:
    verdict = diagnose(FINE)
    assert verdict.is_fine
    assert "all 6 full blocks" in verdict.finding
    assert "the rest (4 tokens) fills no block" in verdict.finding
    assert verdict.remedy == ""


CASES = {
    "a decode worker with another form of pages": (
        replace(MISSED, workers=(PREFILL, replace(DECODE, kv_form="int8 from bfloat16"))),
        Cause.FORM,
        "decode-0 stores pages as int8 from bfloat16, the fleet needs bfloat16",
    ),
    "a prefill worker whose pages nobody converts": (
        replace(MISSED, kv_form=KvForm("int8", "bfloat16"), workers=(replace(PREFILL, kv_form="float16"), DECODE)),
        Cause.FORM,
        "prefill-0 stores pages as float16, the fleet needs bfloat16",
    ),
    "a worker with another dtype": (
        replace(MISSED, workers=(PREFILL, replace(DECODE, fingerprint=FLEET.replace("bfloat16", "float32")))),
        Cause.FINGERPRINT,
        "dtype float32 instead of bfloat16",
    ),
    "a worker with a fingerprint without fields": (
        replace(MISSED, workers=(PREFILL, replace(DECODE, fingerprint="odd"))),
        Cause.FINGERPRINT,
        "decode-0",
    ),
    "a worker with another block size": (
        replace(MISSED, workers=(PREFILL, replace(DECODE, fingerprint=FLEET.replace("size=16", "size=32")))),
        Cause.BLOCK_SIZE,
        "block_size 32 instead of 16",
    ),
    "a refused worker although reuse worked elsewhere": (
        replace(FINE, workers=(PREFILL, DECODE, replace(DECODE, worker="decode-1", fingerprint="odd"))),
        Cause.FINGERPRINT,
        "decode-1",
    ),
    "a draining worker": (replace(MISSED, workers=workers(state="draining")), Cause.UNHEALTHY, "is draining"),
    "a silent worker": (replace(MISSED, workers=workers(event_age_s=9.0)), Cause.UNHEALTHY, "silent for 9.0 s"),
    "no decode worker": (replace(MISSED, workers=(PREFILL,)), Cause.UNHEALTHY, "no decode worker"),
    "no worker": (replace(MISSED, workers=()), Cause.UNHEALTHY, "no decode worker"),
    "a refusal": (second(MISSED, failure="UNAVAILABLE: gone"), Cause.UNHEALTHY, "second chat .* UNAVAILABLE: gone"),
    "a refusal at once": (
        replace(MISSED, first=replace(MISSED.first, failure="no")),
        Cause.UNHEALTHY,
        "first chat was not answered: no",
    ),
    "a chat shorter than a block": (
        second(MISSED, tokens=TOKENS[:9], prompt_tokens=9),
        Cause.PARTIAL_BLOCK,
        "9 tokens and a block 16",
    ),
    "a tokenizer with more tokens than the model": (
        replace(MISSED, vocab_size=50),
        Cause.TOKENIZER,
        "token 99, and the model knows 50",
    ),
    "a refusal of a token that the model does not know": (
        second(replace(MISSED, vocab_size=50), failure="INVALID_ARGUMENT"),
        Cause.TOKENIZER,
        "token 99",
    ),
    "another count of tokens than Tokenize says": (second(MISSED, prompt_tokens=90), Cause.TOKENIZER, "had 90"),
    "a template that tells the time": (
        second(MISSED, tokens=(*TOKENS[:20], 4000, *TOKENS[21:]), cached_tokens=16),
        Cause.TEMPLATE,
        "from token 20 of 100 on: 1 block can be shared, 1 was reused",
    ),
    "a template that grows": (second(MISSED, tokens=(*TOKENS, 5), prompt_tokens=101), Cause.TEMPLATE, "from token 100"),
    "two salts": (second(MISSED, salt="b"), Cause.SALT, "'' and then 'b'"),
    "an index behind": (
        replace(MISSED, workers=workers(own_sequence=9, held_blocks=0, stored_blocks=0)),
        Cause.STALE_INDEX,
        "published 9 event batches, and the router's index knows 7",
    ),
    "an index that has heard nothing": (
        replace(MISSED, workers=workers(index_sequence=None, held_blocks=0, stored_blocks=0)),
        Cause.STALE_INDEX,
        "knows 0",
    ),
    "blocks that were evicted": (
        replace(MISSED, workers=workers(held_blocks=0)),
        Cause.EVICTION,
        "had 6 blocks of the chat and kept 0",
    ),
    "half evicted and the rest reused": (
        second(replace(MISSED, workers=workers(held_blocks=2)), cached_tokens=32),
        Cause.EVICTION,
        "kept 2",
    ),
    "a policy that does not look": (
        replace(MISSED, policy="random", is_blind=True),
        Cause.POLICY,
        "policy random does",
    ),
    "a policy that chose another worker": (MISSED, Cause.POLICY, "the policy kv found another worker sooner"),
    "a policy that nobody names": (replace(MISSED, policy=None), Cause.POLICY, "(unknown)"),
    "nobody held anything": (
        replace(MISSED, workers=workers(held_blocks=0, stored_blocks=0)),
        Cause.UNEXPLAINED,
        "0 of 6 blocks",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_wrong_is_named_with_a_remedy(case: str) -> None:
    facts, cause, told = CASES[case]
    verdict = diagnose(facts)
    assert verdict.cause is cause
    assert not verdict.is_fine
    assert re.search(told, verdict.finding), verdict.finding
    assert verdict.remedy


def test_every_cause_is_met_by_a_case() -> None:
    assert {cause for _, cause, _ in CASES.values()} | {Cause.FINE} == set(Cause)
    assert len(CHECKS) >= len(Cause) - 1


def test_what_nobody_tells_is_no_fault() -> None:
    silent = workers(own_sequence=None, event_age_s=None)
    assert diagnose(replace(FINE, workers=silent)).is_fine
    assert diagnose(replace(MISSED, workers=silent)).cause is Cause.POLICY
