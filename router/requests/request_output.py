"""The output of one client request: the dispatcher's tokens as text, and the events that a reply is made of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import partial

from router.fleet.token_stream import TokenDelta
from router.fleet.worker import ServingFacts
from router.metrics import RouterMetrics
from router.requests.client_request import ClientRequest
from router.serving.dispatcher import RouterCore
from router.serving.parent_request import ParentRequest
from router.text.detokenize import OutputText
from router.text.output.events import Sink, TextEvent, Usage
from router.text.output.parsed_text import ParsedText
from router.text.stop_strings import StopScanner, StopStrings
from router.text.tokenizer import Text
from twostroke.base.errors import InternalError, InvalidRequest
from twostroke.request import FinishReason, PromptLogprobs, SampledToken

TURN_S = 0.004
"""Seconds in which messages of streams are made, in one turn of the event loop."""
AT_ONCE = 16
"""Most messages that are made without a look at the time. The costliest take a third of a millisecond each."""


class OutputShare:
    """Divides the time of an event loop among the clients that get streams."""

    def __init__(self) -> None:
        self._ends_s: float | None = None
        """When the time for messages of this turn ends, by `perf_counter`. None: no message was made in this turn."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting messages by client; the first client is next."""
        self.whole_bodies = asyncio.Lock()
        """Held while a long body is made on a thread: several at once would keep the event loop waiting for the GIL."""

    @property
    def is_over(self) -> bool:
        """Whether a message has to wait: this turn's time is over, or others wait. The first look begins a turn."""
        now_s = time.perf_counter()
        if self._ends_s is None:
            self._ends_s = now_s + TURN_S
            asyncio.get_running_loop().call_soon(self._begin_turn)
            return False
        return bool(self._waiting) or now_s > self._ends_s

    async def wait_for_turn(self, client: str) -> None:
        """Returns when the client may make its next message."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(waiting)
        await waiting

    def _begin_turn(self) -> None:
        if not self._waiting:
            self._ends_s = None
            return
        for _ in range(AT_ONCE):
            if not self._waiting:
                break
            client, queue = self._waiting.popitem(last=False)
            waiting = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not waiting.done():  # its client may have left
                waiting.set_result(None)
        self._ends_s = time.perf_counter() + TURN_S
        asyncio.get_running_loop().call_soon(self._begin_turn)


@dataclass(frozen=True, slots=True)
class OutputDependencies:
    """What the outputs of all requests use."""

    dispatcher: RouterCore
    text: Text
    metrics: RouterMetrics
    share: OutputShare


class RequestOutput:
    """The output of one client request. It counts tokens, and puts the usage into the last event."""

    def __init__(
        self,
        dependencies: OutputDependencies,
        request: ClientRequest,
        parents: tuple[ParentRequest, ...],
        facts: ServingFacts,
        sink: Sink,
    ) -> None:
        self._dispatcher = dependencies.dispatcher
        self._text = dependencies.text
        self._metrics = dependencies.metrics
        self._share = dependencies.share
        self._client_request = request
        self._prompts = request.body.token_prompts
        self._parents = parents
        self._facts = facts
        self._sink = sink
        self._spend, self._is_prompt_only = request.auth.spend, request.body.options.is_prompt_only
        self._point = request.point
        ended = [sent for sent in self._point.sent if sent.is_finished]
        self._choices_left = len(self._point.sent) - len(ended)
        self._completion_tokens = sum(sent.tokens or 0 for sent in ended)
        self._cached_tokens = 0
        self._has_token = self._point.resumptions > 0
        stop = request.body.options.stop
        self._stops = StopStrings(stop) if stop else None

    async def run(self) -> None:
        n = self._client_request.body.options.n
        unfinished = [index for index, parent in enumerate(self._parents) if len(parent.ended_choices) < n]
        if not unfinished:
            if not self._point.is_complete:
                self._sink.put(TextEvent(0, "", usage=self._usage(), is_sent=True))
                await self._sink.drain()
            return
        if len(unfinished) == 1:
            await self._run_prompt(unfinished[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index in unfinished:
                    group.create_task(self._run_prompt(index))
                    await asyncio.sleep(0)  # each prompt begins in a turn of its own
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_prompt(self, index: int) -> None:
        parent = self._parents[index]
        self._spend(len(parent.request.prompt))
        if not parent.resumptions:
            self._metrics.prompt_tokens_total.inc(len(parent.request.prompt))
        prompt = _Prompt(parent, self._choices(index))
        cached: dict[int, int] = {}
        deltas = self._dispatcher.generate(parent, partial(self._take_at_once, prompt))
        async with contextlib.aclosing(deltas):
            async for number, delta in deltas:
                prompt.waits = True
                choice = prompt.choices[number]
                for position, token in enumerate(delta.tokens, delta.position):
                    await self._turn()
                    self._take_token(prompt, number, delta, token, position)
                    await self._sink.drain()
                if delta.finish is not None and not choice.is_finished:
                    await self._turn()
                    cached[number] = choice.cached_tokens = delta.cached_tokens
                    if len(cached) == len(prompt.choices):  # the later choices of a prompt always reuse the first
                        self._cached_tokens += min(cached.values())
                        self._metrics.cached_tokens_total.inc(min(cached.values()))
                    self._finish(choice, delta.finish)
                    await self._sink.drain()
                prompt.waits = False
        if not all(choice.is_finished for choice in prompt.choices.values()):
            raise InternalError(f"the output of {parent.request_id} ended without a finish reason")

    async def _turn(self) -> None:
        if self._share.is_over:
            await self._share.wait_for_turn(self._client_request.tenant or self._point.stream)

    def _take_at_once(self, prompt: _Prompt, number: int, delta: TokenDelta) -> bool:
        """Sends tokens as they arrive. Returns False if they have to wait: for earlier ones, or for the client."""
        if prompt.waits or not self._sink.is_ready or len(delta.tokens) > AT_ONCE or self._share.is_over:
            return False
        for position, token in enumerate(delta.tokens, delta.position):
            self._take_token(prompt, number, delta, token, position)
        self._sink.flush()
        return True

    def _choices(self, index: int) -> dict[int, _Choice]:
        """Returns the choices of one prompt, by number, whose end the client does not have yet."""
        parent, options = self._parents[index], self._client_request.body.options
        ends = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            ends |= frozenset(self._facts.eos_token_ids)
        choices = {}
        includes_stop = options.include_stop_str_in_output
        for number in set(range(options.n)) - parent.ended_choices:
            scanner = None if self._stops is None else StopScanner(self._stops, include_stop=includes_stop)
            mute = frozenset[int]() if includes_stop else ends
            choice = index * options.n + number
            text = self._output_text(index, choice, scanner, mute)
            choices[number] = _Choice(choice, len(parent.request.prompt), text, self._point.sent[choice].tokens or 0)
        return choices

    def _output_text(
        self, index: int, choice: int, scanner: StopScanner | None, mute: frozenset[int]
    ) -> OutputText | ParsedText:
        prompt, options = self._parents[index].request.prompt, self._client_request.body.options
        parsing = self._prompts[index].parsing
        kept = frozenset[str]() if parsing is None else parsing.special
        decoder = self._text.decoder(prompt, skip_special_tokens=options.skip_special_tokens, kept=kept)
        if parsing is None:
            return OutputText(decoder, scanner, mute=mute, min_tokens=options.min_tokens)
        text = OutputText(decoder, None, mute=mute, min_tokens=options.min_tokens)
        return ParsedText(text, parsing.parser(self._point.stream, choice), scanner, min_tokens=options.min_tokens)

    def _take_token(self, prompt: _Prompt, number: int, delta: TokenDelta, token: SampledToken, position: int) -> None:
        """Gives one token of a delta to the sink as an event. If it completes a stop string, the choice is ended.

        Logprobs of the prompt, if there are any, are in the event of the token at position 0.
        """
        choice = prompt.choices[number]
        choice.cached_tokens = max(choice.cached_tokens, delta.cached_tokens)
        text = choice.text
        if choice.text.is_stopped:
            return
        scores = None if position else delta.prompt_logprobs
        if self._is_prompt_only:
            choice.prompt_logprobs = scores
            return
        self._completion_tokens += 1
        new = text.feed(token.token)
        is_sent = position < choice.sent_tokens
        if not (is_sent and delta.is_recovered):
            self._spend(1)  # also for a token that the client has, if it was computed again
        if not is_sent:
            now, last = time.monotonic(), choice.last_token_s
            choice.last_token_s = now
            self._metrics.sent_tokens.add(None if last is None else now - last)
            if not self._has_token:
                self._has_token = True
                self._metrics.ttft_seconds.observe(now - self._client_request.received_s)
        event = TextEvent(
            choice.index,
            new,
            choice.prompt_tokens,
            text.tokens,
            token,
            is_sent=is_sent,
            parts=text.parts,
            cached_tokens=choice.cached_tokens,
            prompt_logprobs=scores,
        )
        self._sink.put(event)
        if text.is_stopped:
            self._dispatcher.finish_early(prompt.parent, number)

    def _finish(self, choice: _Choice, reason: FinishReason) -> None:
        choice.is_finished = True
        rest = choice.text.flush(is_cut=reason is not FinishReason.STOP)
        if choice.text.is_stopped:
            reason = FinishReason.STOP
        if reason is FinishReason.STOP and self._is_prompt_only:
            reason = FinishReason.LENGTH  # the token that is not shown may have been a stop token
        if reason is FinishReason.ERROR:
            raise InternalError("a worker ended the answer with an error it did not name")
        if choice.text.tokens < choice.sent_tokens:
            raise InvalidRequest("the stream that is to be resumed answers another request", field="resume_from")
        self._choices_left -= 1
        usage = self._usage() if self._choices_left == 0 else None
        counts = choice.prompt_tokens, choice.text.tokens
        parts, stop = choice.text.parts, choice.text.stop_string
        event = TextEvent(choice.index, rest, *counts, finish=reason, usage=usage, parts=parts, stop_string=stop)
        self._sink.put(event._replace(cached_tokens=choice.cached_tokens, prompt_logprobs=choice.prompt_logprobs))

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(parent.request.prompt) for parent in self._parents)
        return Usage(prompt_tokens, self._completion_tokens, self._cached_tokens)


@dataclass(slots=True)
class _Choice:
    """One choice whose end the client does not have yet."""

    index: int
    prompt_tokens: int
    text: OutputText | ParsedText
    sent_tokens: int
    """Tokens that the client has already."""
    is_finished: bool = False
    last_token_s: float | None = None
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was reused, as far as is known."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the prompt for the last event, if no token of the choice is shown."""


@dataclass(slots=True)
class _Prompt:
    """One prompt that is being answered."""

    parent: ParentRequest
    choices: dict[int, _Choice]
    waits: bool = False
    """Whether tokens wait for their turn or for the client, and later ones must not overtake them."""
