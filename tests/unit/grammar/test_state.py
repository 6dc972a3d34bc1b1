"""What a grammar permits next is a function of it and of the answer's tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

import twostroke.grammar.compiler as compiler_module
from tests.unit.grammar.grammars import byte_compiler, lark, regex, schema, text_state
from twostroke.base.errors import ConfigError, InvalidRequest, UnsupportedFeature
from twostroke.base.token_mask import candidates, permitted
from twostroke.grammar.compiler import KEPT_CHARS, KEPT_GRAMMARS, MOST_ERROR_CHARS, GrammarCompiler
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.request import Grammar

END = 256
DATE = regex("[0-9]{4}-[01][0-9]")
PERSON = schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"enum": ["Rome", "Romford"]}},
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    }
)
CHOICE = lark('start: "yes, please" | "yes, thanks" | "no"')
GRAMMARS = (DATE, PERSON, CHOICE, regex("(ab|a)*c?"), lark('start: "x" start "y" | "z"'))
SIZE = 49152
"""Width of SmolLM2's logits."""
SMOLLM2_ENDS = (2, 0)


def texts(state: GrammarState) -> set[str]:
    return {"END" if token == END else chr(token) for token in permitted(state.mask, 258).tolist()}


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(load_vocabulary(str(smollm2_dir), SIZE, SMOLLM2_ENDS))


def test_only_what_the_grammar_permits_is_in_the_mask() -> None:
    assert texts(text_state(DATE)) == set("0123456789")
    assert texts(text_state(DATE, "2026")) == {"-"}
    assert texts(text_state(DATE, "2026-")) == {"0", "1"}
    assert texts(text_state(CHOICE, "yes, ")) == {"p", "t"}


def test_end_tokens_come_where_the_answer_may_end_and_nowhere_else() -> None:
    assert texts(text_state(regex("a{2,3}"), "a")) == {"a"}
    assert texts(text_state(regex("a{2,3}"), "aa")) == {"a", "END"}
    assert texts(text_state(regex("a{2,3}"), "aaa")) == {"END"}
    several = byte_compiler(260, (259, 257))
    state = several.state(regex("a+"), [97])
    assert permitted(state.mask, 260).tolist() == [97, 257, 259]


def test_a_finished_answer_is_followed_by_the_first_end_token_alone() -> None:
    state = byte_compiler(260, (259, 257)).state(regex("a"), [97])
    assert permitted(state.mask, 260).tolist() == [259]
    assert state.forced_token == 259


def test_a_state_is_the_same_whether_it_was_replayed_or_followed() -> None:
    text = '{"name": "Ada", "age": 36, "city": "Rome"}'
    followed = text_state(PERSON)
    for count, token in enumerate(text.encode()):
        replayed = text_state(PERSON, text[:count])
        np.testing.assert_array_equal(replayed.mask, followed.mask)
        assert replayed.forced_token == followed.forced_token
        followed.consume(token)
    assert followed.failure is None
    assert followed.tokens == len(text)
    assert text_state(PERSON, text).tokens == 0, "an earlier attempt has counted them"


@settings(max_examples=60, deadline=None)
@given(which=st.sampled_from(range(len(GRAMMARS))), picks=st.lists(st.integers(0, 10**6), max_size=40))
def test_a_forced_token_is_the_only_one_of_the_mask(smollm2: GrammarCompiler, which: int, picks: list[int]) -> None:
    """Forced tokens are found without a mask, and the sampler could draw no other."""
    state = smollm2.state(GRAMMARS[which])
    for pick in picks:
        ids, forced = permitted(state.mask, SIZE).tolist(), state.forced_token
        assert ids, state.failure
        if forced is not None:
            assert ids == [forced]
        token = ids[pick % len(ids)]
        if token in SMOLLM2_ENDS:
            break
        state.consume(token)
        assert state.failure is None


def test_a_run_of_forced_tokens_is_found_at_once_and_is_the_same_from_each_of_its_tokens_on(
    smollm2: GrammarCompiler,
) -> None:
    """One that were found again for each token would take the square of its length, on the thread of all streams."""
    constant = lark("start: " + json.dumps("  the first\n\nté, 日本 😀 said: " * 6))
    state, run = smollm2.state(constant), []
    while (token := state.take_forced()) is not None and token not in SMOLLM2_ENDS:
        run.append(token)
        state.consume(token)
        assert state.failure is None
    assert len(run) > 60
    for cut in range(len(run)):
        again = smollm2.state(constant, run[:cut])
        assert again.forced_token == run[cut]
        assert [*again.forced_run(len(run))] == run[cut:]
        assert [*again.forced_run(2)] == run[cut : cut + 2]


def test_masks_along_a_forced_run_permit_the_forced_token_alone(smollm2: GrammarCompiler) -> None:
    grammar = lark('start: "the first and the second said: " ("yes" | "no")')
    known, unknown = smollm2.state(grammar), smollm2.state(grammar)
    run = known.forced_run(100)
    assert len(run) > 4
    along = known.masks_along(run)
    assert [mask.tolist() for mask in along] == [mask.tolist() for mask in unknown.masks_along(run)]
    ids = [candidates(mask, SIZE, ()).tolist() for mask in along]
    assert ids[:-1] == [[token] for token in run]
    assert len(ids[-1]) > 1


def test_no_run_is_forced_behind_a_choice_or_an_end() -> None:
    state = byte_compiler().state(regex("a[xy]"))
    assert bytes(state.forced_run(9)) == b"a"
    assert not state.forced_run(0)
    state.consume(ord("a"))
    assert not state.forced_run(9)
    state.consume(ord("x"))
    assert state.forced_token is not None
    assert not state.forced_run(9)


def test_a_long_run_of_forced_tokens_takes_no_more_than_its_length(smollm2: GrammarCompiler) -> None:
    def seconds(words: int) -> float:
        state = smollm2.state(lark(f'start: "{"ab cd e" * words}"'))
        began_s = time.thread_time()
        while (token := state.take_forced()) is not None and token not in SMOLLM2_ENDS:
            state.consume(token)
        return time.thread_time() - began_s

    assert min(seconds(2000) for _ in range(3)) < 30 * min(seconds(200) for _ in range(3)), "ten times as long"


def test_one_answer_does_not_move_another_of_the_same_grammar() -> None:
    compiler = byte_compiler()
    first, second = compiler.state(DATE), compiler.state(DATE)
    for token in b"2026":
        first.consume(token)
    assert texts(second) == set("0123456789")
    assert texts(compiler.state(DATE)) == set("0123456789")


def test_tokens_that_do_not_match_are_refused_when_replayed_and_noted_when_followed() -> None:
    with pytest.raises(InvalidRequest, match="token 120 does not match the answer's grammar") as refusal:
        text_state(DATE, "20x")
    assert refusal.value.field == "grammar"
    state = text_state(DATE)
    state.consume(120)
    assert state.failure == "token 120 does not match the answer's grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("start: /a/ nonsense %%%"),
        Grammar('{"grammars": [{"json_schema": {"type": "nonsense"}}]}'),
        Grammar("{"),
        regex("[" + "a" * 3000),
        lark("start: missing"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_in_one_line(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match=r"^the grammar cannot be compiled: ") as refusal:
        byte_compiler().state(grammar)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < MOST_ERROR_CHARS + 100
    assert refusal.value.field == "grammar"


def test_a_compiler_keeps_the_grammars_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counted(tokenizer: Any, source: str, **options: Any) -> LLMatcher:
        compiled.append(source)
        return LLMatcher(tokenizer, source, **options)

    monkeypatch.setattr(compiler_module, "LLMatcher", counted)
    compiler, others = byte_compiler(), [regex(f"a{{{number + 1}}}") for number in range(KEPT_GRAMMARS - 1)]
    for grammar in (DATE, *others, DATE, regex("b"), DATE):
        compiler.state(grammar)
    assert compiled == [each.source for each in (DATE, *others, regex("b"))], "DATE was used after the others"
    compiler.state(others[0])
    assert compiled[-1] == others[0].source, "it was used first, and is compiled again"


def test_large_grammars_are_kept_while_all_of_them_are_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes megabytes: without a bound a few hundred clients' schemas are more memory than a worker has."""
    compiled: list[str] = []

    def compile_now(tokenizer: LLTokenizer, source: str, **options: Any) -> LLMatcher:
        compiled.append(source)
        return LLMatcher(tokenizer, source, **options)

    monkeypatch.setattr(compiler_module, "LLMatcher", compile_now)
    compiler = byte_compiler()
    small, *large = [lark(f'start: "{rank}{"x" * (KEPT_CHARS // 3)}"' if rank else 'start: "a"') for rank in range(4)]
    for grammar in (small, *large, large[2], large[1]):
        compiler.state(grammar)
    assert len(compiled) == 4, "the last two are kept"
    compiler.state(large[0])
    compiler.state(small)
    assert compiled[4:] == [large[0].source, small.source]


def test_masks_are_as_wide_as_logits_are(smollm2: GrammarCompiler, smollm2_dir: Path) -> None:
    padded = GrammarCompiler(load_vocabulary(str(smollm2_dir), SIZE + 70, SMOLLM2_ENDS))
    mask = padded.state(regex("(?s:.*)")).mask
    assert len(mask) == -(-(SIZE + 70) // 32)
    assert permitted(mask, SIZE + 70).max() < SIZE, "no token stands behind the rest"
    assert len(smollm2.state(DATE).mask) == SIZE // 32


def test_special_tokens_are_no_text(smollm2: GrammarCompiler) -> None:
    mask = smollm2.state(regex("(?s:.*)")).mask
    assert set(range(17)) & set(permitted(mask, SIZE).tolist()) == set(SMOLLM2_ENDS)


def test_a_model_without_an_end_token_or_tokenizer_file_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFeature, match="grammars need a model with an end token"):
        load_vocabulary("", 300, ())
    with pytest.raises(ConfigError, match="cannot be read for grammars"):
        load_vocabulary(str(tmp_path), 300, (2,))


def test_banned_tokens_are_no_candidates_unless_nothing_else_is_left() -> None:
    mask = text_state(regex("a{2,3}"), "aa").mask
    assert candidates(mask, 258, ()).tolist() == [97, END]
    assert candidates(mask, 258, (END,)).tolist() == [97]
    assert candidates(mask, 258, (END, 97)).tolist() == [97, END]


def test_forced_tokens_do_not_depend_on_when_somebody_asked_for_them(smollm2: GrammarCompiler) -> None:
    """Alone, what is left of this run would be one token: a contraction, which the sign before it keeps from being."""
    grammar = schema({"const": "\N{SLIGHTLY SMILING FACE}'ll"})
    asked, masked = smollm2.state(grammar), smollm2.state(grammar)
    answer: list[int] = []
    while (run := asked.forced_run(8)) and run[0] not in SMOLLM2_ENDS:
        resumed = smollm2.state(grammar, answer)
        assert [permitted(state.mask, SIZE).tolist() for state in (asked, masked, resumed)] == 3 * [[run[0]]]
        assert resumed.forced_run(8) == run
        answer.append(run[0])
        asked.consume(run[0])
        masked.consume(run[0])
    assert len(answer) > 2


def test_a_mask_permits_tokens_of_large_vocabularies_and_none_behind_their_end() -> None:
    size = (1 << 17) + 9
    ids = [0, 31, 32, (1 << 16) - 1, 1 << 16, (1 << 17) + 8, size]
    bits = np.isin(np.arange(-(-size // 32) * 32), ids)
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    assert permitted(mask, size).tolist() == ids[:-1]
    assert candidates(mask, size, (0, 1 << 16)).tolist() == [31, 32, (1 << 16) - 1, (1 << 17) + 8]
    assert candidates(mask, size, ids).tolist() == ids[:-1], "where all are banned, the grammar goes on"
