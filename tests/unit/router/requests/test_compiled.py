"""Grammars are compiled once, in a process that may be ended, and requests that use them meet plain errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import pytest

from router.metrics import RouterMetrics
from router.preparation.preparer import ProcessPreparer
from router.requests.compiled_grammars import CompiledGrammars, _size_bytes
from router.requests.work import PreparationOutcome
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.trials.bench.extremes.outputs import EXTREME
from tests.trials.bench.extremes.outputs import output_of as output
from tests.unit.router.preparation.test_preparation import Ticker, running
from twostroke.base.errors import InvalidRequest, Overloaded

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
HURRIED_S = 0.4
INTEGER = StructuredOutput("json", b'{"type":"integer"}', "field")


def value_of(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"twostroke_{name}", {"role": "router", **labels})


async def test_equal_outputs_are_compiled_once_and_counted():
    inline, metrics = InlinePreparer(ByteText()), RouterMetrics()
    grammars = CompiledGrammars(inline, metrics)
    first = await grammars.compiled(INTEGER, "a")
    assert await grammars.compiled(INTEGER, "b") is first
    assert inline.compilations == 1
    assert value_of(metrics, "grammars_compiled_total", kind="json") == 1
    assert value_of(metrics, "grammar_cache_hits_total") == 1
    assert value_of(metrics, "grammar_compile_seconds_count") == 1


async def test_a_refusal_is_kept_too():
    inline, metrics = InlinePreparer(ByteText()), RouterMetrics()
    grammars = CompiledGrammars(inline, metrics)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match='"not" at # is not supported'):
            await grammars.compiled(output("json", {"not": {}}), "")
    assert inline.compilations == 1
    assert value_of(metrics, "grammars_refused_total", kind="json", cause="not") == 1


async def test_the_least_recently_used_grammar_is_dropped_first():
    inline = InlinePreparer(ByteText())
    grammars = CompiledGrammars(inline, RouterMetrics(), most_bytes=3000)
    await grammars.compiled(output("regex", "a"), "")
    await grammars.compiled(output("regex", "b"), "")
    await grammars.compiled(output("regex", "a"), "")
    await grammars.compiled(output("regex", "c"), "")
    assert inline.compilations == 3
    await grammars.compiled(output("regex", "a"), "")
    assert inline.compilations == 3
    await grammars.compiled(output("regex", "b"), "")
    assert inline.compilations == 4


class SlowPreparer(InlinePreparer):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(ByteText())
        self.may_end = asyncio.Event()

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        outcome = await super().compile(output, tenant)
        await self.may_end.wait()
        return outcome


async def test_requests_that_ask_for_the_same_at_once_wait_for_one_compilation():
    slow = SlowPreparer()
    grammars = CompiledGrammars(slow, RouterMetrics())
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(grammars.compiled(INTEGER, "")) for _ in range(3)]
        await asyncio.sleep(0)
        slow.may_end.set()
    assert slow.compilations == 1
    assert len({id(task.result()) for task in waiting}) == 1


class QueuedPreparer(SlowPreparer):
    """The queue of one tenant is long."""

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        if tenant == "hostile":
            return await super().compile(output, tenant)
        return await InlinePreparer.compile(self, output, tenant)


async def test_a_tenant_with_a_long_queue_does_not_hold_up_another_that_wants_the_same() -> None:
    queued_preparer = QueuedPreparer()
    grammars = CompiledGrammars(queued_preparer, RouterMetrics())
    queued = asyncio.create_task(grammars.compiled(INTEGER, "hostile"))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        compiled = await grammars.compiled(INTEGER, "other")
    assert not queued.done()
    queued_preparer.may_end.set()
    assert (await queued).grammar == compiled.grammar
    assert await grammars.compiled(INTEGER, "third") is compiled
    assert grammars._known_bytes == sum(map(_size_bytes, grammars._known.values()))


async def test_where_the_first_of_them_leaves_another_compiles():
    slow = SlowPreparer()
    grammars = CompiledGrammars(slow, RouterMetrics())
    first = asyncio.create_task(grammars.compiled(INTEGER, ""))
    await asyncio.sleep(0)
    second = asyncio.create_task(grammars.compiled(INTEGER, ""))
    await asyncio.sleep(0)
    first.cancel()
    slow.may_end.set()
    assert (await second).grammar.source
    assert slow.compilations == 2


@contextlib.asynccontextmanager
async def hurried() -> AsyncIterator[ProcessPreparer]:
    """A grammar may take a fraction of the processor time that it may elsewhere."""
    async with running() as prepares:
        compiler = prepares._grammars
        compiler._program = dataclasses.replace(compiler._program, cpu_s=HURRIED_S)
        yield prepares


REFUSED = {"deep", "a cycle of references", "patterns at once", "a grammar that doubles"}
IN_GATE = REFUSED
"""Each that takes all of its time costs a new process, too."""


@pytest.mark.parametrize(
    "names", [pytest.param(IN_GATE, id="of the gate"), pytest.param(set(EXTREME), id="all", marks=pytest.mark.slow)]
)
async def test_extreme_outputs_end_within_their_limits_and_hold_nobody(names: set[str]) -> None:
    """Each compiles, or is refused in one line, and afterwards the next grammar still compiles."""
    async with hurried() as prepares:
        grammars = CompiledGrammars(prepares, RouterMetrics())
        refused: dict[str, InvalidRequest] = {}
        for name in sorted(names):
            try:
                await grammars.compiled(output(*EXTREME[name]), "")
            except InvalidRequest as error:
                refused[name] = error
        assert (await grammars.compiled(output("regex", "a"), "")).grammar.source
    assert refused.keys() >= REFUSED
    for name, error in refused.items():
        assert "\n" not in error.message, name
        assert error.field == "field", name


async def test_a_grammar_that_takes_too_much_holds_no_event_loop_and_is_refused_for_good() -> None:
    """Half of the time that it may take would be a hold."""
    async with hurried() as prepares:
        grammars = CompiledGrammars(prepares, RouterMetrics())
        async with Ticker() as ticker:
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="to compile the grammar takes more"):
                    await grammars.compiled(output(*EXTREME["patterns at once"]), "")
                assert prepares._grammars._child is None, "the second time nothing is compiled"
        assert ticker.worst_s < HURRIED_S / 2


async def test_a_grammar_that_a_busy_machine_did_not_compile_is_not_refused_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process gets no processor time: that says nothing about the grammar."""
    async with running() as prepares:
        await prepares.compile(output("regex", "a"), "")
        child = prepares._grammars._child
        assert child is not None
        program = prepares._grammars._program
        monkeypatch.setattr(prepares._grammars, "_program", dataclasses.replace(program, work_s=0.2))
        grammars = CompiledGrammars(prepares, RouterMetrics())
        os.kill(child._process.pid, signal.SIGSTOP)
        with pytest.raises(Overloaded, match=r"the router could not compile the grammar within 0\.2 s"):
            await grammars.compiled(INTEGER, "")
        monkeypatch.setattr(prepares._grammars, "_program", program)
        assert (await grammars.compiled(INTEGER, "")).grammar.source


async def test_a_grammar_does_not_wait_for_ever_behind_others_and_a_killed_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hundred of one tenant take two seconds each: whoever comes behind them is told so, and they go on."""
    async with running() as prepares:
        program = prepares._grammars._program
        monkeypatch.setattr(prepares._grammars, "_program", dataclasses.replace(program, wait_s=0.0))
        with pytest.raises(Overloaded, match="too many others come first"):
            await prepares.compile(INTEGER, "")
        monkeypatch.setattr(prepares._grammars, "_program", program)
        assert (await prepares.compile(INTEGER, "")).error is None
        child = prepares._grammars._child
        assert child is not None
        os.kill(child._process.pid, signal.SIGKILL)
        assert (await prepares.compile(output("regex", "a"), "")).error is None


async def test_over_http_a_schema_is_refused_before_the_dispatcher_has_the_request(app):
    dispatcher, http = app
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
    answer = await http.post("/v1/chat/completions", json={**CHAT, "response_format": wanted})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert error["message"] == 'response_format.json_schema.schema: "not" at # is not supported'
    assert not dispatcher.requests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_grammar_goes_to_the_worker_with_every_choice(app, path):
    dispatcher, http = app
    prompt = {"prompt": "a"} if path == "/v1/completions" else CHAT
    body = {**prompt, "n": 2, "structured_outputs": {"choice": ["yes", "no"]}}
    assert (await http.post(path, json=body)).status_code == 200
    parent = dispatcher.parents[-1]
    assert parent.n == 2
    grammars = [parent.request.of_choice(choice).sampling.grammar for choice in range(2)]
    assert all(grammar is not None and "yes|no" in grammar.source for grammar in grammars)
