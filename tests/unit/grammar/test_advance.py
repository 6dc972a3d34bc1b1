"""Grammars go on beside the event loop: a slow one keeps nobody waiting, and none changes what may come."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from tests.unit.grammar.grammars import byte_compiler, regex
from twostroke.grammar.advance import WAIT_S, Advance, ThreadedAdvancer
from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.state import SLOW_S, GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.request import Grammar, plain_token

HOSTILE = Grammar('{"grammars": [{"lark_grammar": "start: s\\ns: s s s | s s | /[ -~]/"}]}')
"""Each further token has more ways to be read: a mask soon takes many times what a step may wait."""
LETTERS = regex("[a-z]*")
TEXT = "so many ways to read it"


@pytest.fixture(scope="module")
def compiler(smollm2_dir) -> GrammarCompiler:
    return GrammarCompiler(load_vocabulary(str(smollm2_dir), 49152, (2,)))


def hostile(compiler: GrammarCompiler) -> GrammarState:
    return compiler.state(HOSTILE, compiler.vocabulary.tokenizer.greedy_tokenize(TEXT))


def advance_of(state: GrammarState, token: int, most: int = 10, *, takes_forced: bool = True) -> Advance:
    return Advance(state, [plain_token(token)], (), most, takes_forced, ends=(2,))


async def until_done(advance: Advance) -> None:
    async with asyncio.timeout(60):
        while not advance.is_done:
            await asyncio.sleep(0.005)


async def test_a_slow_grammar_is_not_waited_for_and_comes_to_the_same(compiler: GrammarCompiler) -> None:
    (letter,) = compiler.vocabulary.tokenizer.greedy_tokenize("a")
    expected = advance_of(hostile(compiler), letter)
    expected.run()
    assert expected.state.latest_s > 5 * WAIT_S, "it is slow"

    woken = asyncio.Event()
    advancer = ThreadedAdvancer(woken.set)
    slow, quick = advance_of(hostile(compiler), letter), advance_of(compiler.state(LETTERS), letter)
    begun_s = time.perf_counter()
    advancer.run([quick, slow])
    taken_s = time.perf_counter() - begun_s
    assert taken_s < expected.state.latest_s, "nobody waits until it is done"
    assert not slow.is_done
    await asyncio.wait_for(woken.wait(), 60)
    assert quick.is_done
    assert slow.is_done
    np.testing.assert_array_equal(slow.state.mask, expected.state.mask)
    assert slow.state.is_slow
    advancer.close()


async def test_a_grammar_that_was_slow_does_not_go_before_others(compiler: GrammarCompiler) -> None:
    """Four of them would take all threads of those that are quick."""
    (letter,) = compiler.vocabulary.tokenizer.greedy_tokenize("a")
    advancer = ThreadedAdvancer(lambda: None)
    states = [hostile(compiler) for _ in range(4)]
    for state in states:
        state.note_advance(2 * SLOW_S)
    slow = [advance_of(state, letter) for state in states]
    quick = advance_of(compiler.state(LETTERS), letter)
    advancer.run([*slow, quick])
    assert quick.is_done
    assert not all(each.is_done for each in slow)
    for each in slow:
        await until_done(each)
    advancer.close()


def test_what_is_forced_is_taken_as_far_as_the_answer_goes() -> None:
    compiler = byte_compiler()
    for most, forced in ((10, "abcdef"), (3, "abc")):
        advance = advance_of(compiler.state(regex("abcdef[xy]")), ord("a"), most)
        advance.run()
        assert bytes(each.token for each in advance.tokens).decode() == forced
    alone = advance_of(compiler.state(regex("abcdef[xy]")), ord("a"), takes_forced=False)
    alone.run()
    assert [each.token for each in alone.tokens] == [ord("a")]
    assert np.flatnonzero(np.unpackbits(alone.state.mask.view(np.uint8), bitorder="little")).tolist() == [ord("b")]


def test_a_token_that_may_not_come_is_a_failure_and_no_exception() -> None:
    advance = advance_of(byte_compiler().state(regex("ab")), ord("z"))
    advance.run()
    assert advance.is_done
    assert "does not match" in (advance.state.failure or "")
    assert advance.failed is not None
