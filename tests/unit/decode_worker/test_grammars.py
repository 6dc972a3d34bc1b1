"""A decode worker whose requests have grammars: compiled beside its steps, and replayed."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

from decode_worker import grammars
from tests.unit.grammar.grammars import lark, regex
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import PAGE_BYTES, decode, prompt_of
from twostroke.base.errors import InvalidRequest, Overloaded, UnsupportedFeature
from twostroke.config import ModelConfig
from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.state import GrammarState
from twostroke.request import Grammar, token_bits
from twostroke.worker.steps.engine_steps import EngineSteps

EOS = 300
SPEED = "prefill_tokens_per_s=1e6,step_ms=1,step_us_per_seq=0"
MODEL = ModelConfig(model=f"paced:{SPEED},vocab=2048,page_bytes={PAGE_BYTES},max_model_len=4096,eos={EOS}")
WITHOUT_END = ModelConfig(model=f"paced:{SPEED},vocab=2048,page_bytes={PAGE_BYTES},max_model_len=4096")
PROMPT = prompt_of(40)
PATTERN = "[a-z]{2,8} costs [0-9]{1,3} euros and [0-9]{2} cents[.!]"
ANSWER = regex(PATTERN)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == EOS
    return bytes(tokens[:-1]).decode()


async def test_the_vocabulary_is_read_when_the_costs_of_steps_have_been_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading it keeps Python's lock, which would make the measured steps long."""
    happened: list[str] = []
    prepare = EngineSteps.prepare

    async def prepared(steps: EngineSteps) -> None:
        await prepare(steps)
        happened.append("measured")

    monkeypatch.setattr(EngineSteps, "prepare", prepared)
    monkeypatch.setattr(grammars.CompiledAnswers, "begin", lambda answers: happened.append("read"))
    async with decode(model=MODEL):
        assert happened == ["measured", "read"]


async def test_an_answer_matches_its_grammar_and_ends_where_that_ends() -> None:
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        answers = [
            await router.answer(PROMPT, 200, request_id=f"r{seed}", seed=seed, grammar=ANSWER) for seed in range(6)
        ]
        texts = {text_of(got.tokens) for got in answers}
        assert len(texts) > 3
        assert all(re.fullmatch(PATTERN, text) for text in texts)
        assert {got.last.finish_reason for got in answers} == {"stop"}
        tokens = sum(len(got.tokens) for got in answers)
        assert worker.metric("grammar_tokens_total") == pytest.approx(tokens, abs=len(answers))
        assert 0.4 * tokens < worker.metric("grammar_forced_tokens_total") < tokens
        assert worker.metric("grammar_compile_seconds_count") == len(answers)
        assert worker.metric("grammar_mask_seconds_count") < tokens


async def test_an_answer_goes_on_elsewhere_after_each_of_its_tokens() -> None:
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        whole = (await router.answer(PROMPT, 200, grammar=ANSWER)).tokens
        for cut in range(1, len(whole)):
            got = await router.answer(PROMPT, 200, attempt=cut, emitted=whole[:cut], grammar=ANSWER)
            assert got.tokens == whole[cut:], f"after {cut} tokens"
            assert got.positions[0] == cut
        assert worker.metric("grammar_tokens_total") <= sum(len(whole) - cut for cut in range(len(whole)))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("nonsense %%"), "the grammar cannot be compiled"),
        (Grammar('{"grammars": [{"json_schema": {"type": 7}}]}'), "the grammar cannot be compiled"),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(grammar: Grammar, words: str) -> None:
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        beside = await router.open(PROMPT, 200, request_id="beside", grammar=ANSWER)
        with pytest.raises(InvalidRequest, match=words) as refusal:
            await router.open(PROMPT, 8, request_id="broken", grammar=grammar)
        assert refusal.value.field == "grammar"
        await beside.done.wait()
        assert re.fullmatch(PATTERN, text_of(beside.tokens))


async def test_emitted_tokens_that_do_not_match_are_refused() -> None:
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        with pytest.raises(InvalidRequest, match="token 33 does not match the answer's grammar"):
            await router.open(PROMPT, 8, attempt=1, emitted=[33], grammar=ANSWER)


async def test_only_allowed_tokens_are_drawn_and_where_the_grammar_has_none_of_them_the_error_says_so() -> None:
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        few = token_bits(b"abc costs 0123456789 euros and cents.")
        texts = {
            text_of((await router.answer(PROMPT, 200, request_id=f"r{seed}", seed=seed, **_allowed(few))).tokens)
            for seed in range(4)
        }
        assert all(
            re.fullmatch("[abcdenorstu]{2,8} costs [0-9]{1,3} euros and [0-9]{2} cents[.]", text) for text in texts
        )
        got = await router.answer(PROMPT, 200, request_id="none", **_allowed(token_bits(b"abc costs 1")))
        assert got.last.error.field == "allowed_token_ids"
        assert re.fullmatch("[abcost]{2,8} costs 1{1,3} ", text_of([*got.tokens, EOS])), "no e is allowed"
        with pytest.raises(InvalidRequest, match="token ids go up to 2047"):
            await router.open(PROMPT, 8, request_id="beyond", allowed_tokens=token_bits([2048]))


def _allowed(tokens: bytes) -> dict[str, Any]:
    return {"allowed_tokens": tokens, "grammar": ANSWER}


async def test_an_answer_that_runs_into_a_dead_end_is_an_error_that_says_so() -> None:
    dead_end = lark('start: "a" ("b" | "c" X)\nX: /[a-z]/ & /[0-9]/')
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        outcomes = set()
        for seed in range(12):
            got = await router.answer(PROMPT, 9, request_id=f"r{seed}", seed=seed, grammar=dead_end)
            text = bytes(token for token in got.tokens if token != EOS).decode()
            outcomes.add((text, got.last.finish_reason, got.last.error.kind))
            assert "has a dead end" in got.last.error.message or text == "ab"
        assert outcomes == {("ab", "stop", ""), ("ac", "error", "InvalidRequest")}


async def test_a_model_without_an_end_token_refuses_grammars() -> None:
    async with decode(model=WITHOUT_END) as worker, router_to(worker) as router:
        with pytest.raises(UnsupportedFeature, match="need a model with an end token"):
            await router.open(PROMPT, 8, grammar=ANSWER)
        assert len((await router.answer(PROMPT, 8, attempt=1)).tokens) == 8


async def test_a_grammar_that_takes_long_holds_up_neither_steps_nor_other_grammars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, go_on, compile_now = regex("z{3}"), threading.Event(), GrammarCompiler.state

    def state(self: GrammarCompiler, grammar: Grammar, tokens: list[int]) -> GrammarState:
        if grammar == slow:
            assert go_on.wait(30)
        return compile_now(self, grammar, tokens)

    monkeypatch.setattr(GrammarCompiler, "state", state)
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        opening = asyncio.ensure_future(router.open(PROMPT, 20, request_id="slow", grammar=slow))
        try:
            plain = await router.answer(PROMPT, 20, request_id="plain")
            other = await router.answer(PROMPT, 200, request_id="other", grammar=ANSWER)
            assert not opening.done()
        finally:
            go_on.set()
        got = await opening
        await got.done.wait()
        assert plain.tokens
        assert re.fullmatch(PATTERN, text_of(other.tokens))
        assert text_of(got.tokens) == "zzz"


async def test_a_grammar_that_waits_too_long_behind_others_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a mistake of its client's: its router tries another worker."""
    go_on, compile_now = threading.Event(), GrammarCompiler.state

    def state(self: GrammarCompiler, grammar: Grammar, tokens: list[int]) -> GrammarState:
        assert go_on.wait(30)
        return compile_now(self, grammar, tokens)

    monkeypatch.setattr(GrammarCompiler, "state", state)
    monkeypatch.setattr(grammars, "LONGEST_COMPILE_S", 0.1)
    async with decode(model=MODEL) as worker, router_to(worker) as router:
        try:
            with pytest.raises(Overloaded, match="the grammar was not compiled within"):
                await router.open(PROMPT, 20, request_id="late", grammar=ANSWER)
        finally:
            go_on.set()
        monkeypatch.setattr(grammars, "LONGEST_COMPILE_S", 30.0)
        got = await router.answer(PROMPT, 200, request_id="again", grammar=ANSWER)
        assert re.fullmatch(PATTERN, text_of(got.tokens))
