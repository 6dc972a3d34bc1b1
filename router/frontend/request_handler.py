"""The path that every request takes, whichever door it came through: prompt -> tokens -> dispatch -> text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from router.fleet.serving_facts import ServingFacts
from router.frontend.auth.auth import Visit
from router.frontend.output_share import OutputShare
from router.frontend.params import Ask, answer_length, check_prompt, sampling_params
from router.frontend.preparation.prepare import Work, check_model
from router.frontend.preparation.preparer import Preparer
from router.frontend.public_prefixes import PublicPrefixes
from router.frontend.resume import Seeds, stream_of
from router.frontend.text.detokenize import AnswerText
from router.frontend.text.stop_strings import Scanned, StopScanner, StopStrings
from router.frontend.text.tokenizer import Text
from router.metrics import RouterMetrics
from router.serving.generate_request import Dispatcher, FinishEvent, GenerationRequest, TokenEvent
from twostroke.errors import Cancelled, DeadlineExceeded, Draining, InternalError, InvalidRequest, ServeError
from twostroke.fault_points import Point, reach
from twostroke.kv_cache.block import owner_salt
from twostroke.models.recommended import UNKNOWN, Recommended
from twostroke.request import FinishReason, SampledToken, Siblings
from twostroke.tracing.context import TraceContext
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import OpenSpan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TextEvent:
    """One token of one choice with the text it adds, or the end of that choice with the text held back until then."""

    choice: int
    """Counted over all prompts: prompt i of n choices each has choices i*n to i*n + n - 1."""
    text: str
    token: SampledToken | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    """Of the whole request, in its very last event."""
    is_sent: bool = False
    """The client has it (but for the usage): the stream is resumed."""
    prompt_tokens: int = 0
    """Of this choice's prompt."""
    choice_tokens: int = 0
    """Of this choice so far, this one included."""


Sink = Callable[[TextEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """An ask whose prompts are tokens and that has passed every check the front door can make."""

    ask: Ask
    requests: tuple[GenerationRequest, ...]
    facts: ServingFacts
    received_s: float
    """On the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenRequest:
    tenant: str | None
    """The tenant of the API key. None: no key was asked for."""
    parts: tuple[str, ...]
    """Ids of its prompts at the dispatcher."""
    is_id_enough: bool
    """Whoever knows the request's id may abort it."""


class Front:
    """Owns the names of open requests; everything else about them belongs to the dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        preparer: Preparer,
        metrics: RouterMetrics,
        *,
        model: str,
        seeds: Seeds | None = None,
        public: PublicPrefixes | None = None,
        recorder: Recorder | None = None,
        recommended: Recommended = UNKNOWN,
    ) -> None:
        """`recommended`: the sampling that the model's makers recommend; clients are told, nothing follows it here."""
        self.dispatcher = dispatcher
        self.text = preparer.text
        self.metrics = metrics
        self.model = model
        self.recommended = recommended
        self._public = public or PublicPrefixes()
        self._seeds = seeds or Seeds()
        self._recorder = recorder or Recorder()
        self.share = OutputShare()
        self._preparer = preparer
        self._open: dict[tuple[str | None, str], _OpenRequest] = {}
        """By tenant of the API key, if any, and the client's request id."""
        self._streams: dict[str, _OpenRequest] = {}
        """By name of the stream."""

    def check_model(self, model: str | None) -> None:
        check_model(model, self.model)

    async def prepare(
        self,
        kind: str,
        body: bytes,
        visit: Visit,
        *,
        client: str,
        request_id: str = "",
        deadline_s: float | None = None,
    ) -> Any:
        """What preparation makes of a request. Tokens that were counted for nothing are charged, too.

        `client`: who takes turns with others where no API key tells. `request_id`, for the log, and `deadline_s`, in
        Unix seconds, are given where they are known before the body is read.
        """
        if self.dispatcher.is_draining:
            raise Draining("this router takes no new requests: it is shutting down")
        work = Work(kind, body, self.model, self.dispatcher.facts)
        try:
            async with _until(deadline_s):
                outcome = await self._preparer.prepare(work, visit.tenant or client)
            if outcome.error is not None or isinstance(outcome.value, bytes):
                visit.spend(outcome.tokens)
            if outcome.error is not None:
                raise outcome.error
        except ServeError as error:
            self.metrics.count_request(error.label())
            _log_failure(request_id, error)
            raise
        return outcome.value

    async def abort(self, request_id: str, resume_token: str, visit: Visit) -> bool:
        """End the request of that id, or the one of a stream of which the client has a token. Without API keys an id
        that a client chose is not enough: others can guess it."""
        if resume_token:
            opened = self._streams.get(stream_of(resume_token))
        else:
            opened = self._open.get((visit.tenant, request_id))
        if opened is None or opened.tenant != visit.tenant or not (resume_token or opened.is_id_enough):
            return False
        aborted = [await self.dispatcher.abort(part) for part in opened.parts]
        return any(aborted)

    async def answer(self, ask: Ask, sink: Sink) -> None:
        """Send every event of the answer to `sink`. Raises ServeError; cancelling this call cancels everywhere."""
        received_s = time.monotonic() if ask.received_s is None else ask.received_s
        status = Cancelled.label()
        span = self._recorder.root("request", ask.point.stream, ask.traceparent)
        span.start_s -= time.monotonic() - received_s
        self.metrics.open_requests.inc()
        try:
            async with _until(ask.deadline_s):
                ask.visit.widen(ask.open_answers)
                with self._named(ask) as request_ids:
                    call = await self._prepared(ask, request_ids, received_s, span)
                    reach(Point.ROUTER_RECEIVED)
                    await _Answer(self, call, sink).run()
            status = "ok"
        except asyncio.CancelledError:
            log.info("request cancelled request=%s", ask.request_id)
            raise
        except ServeError as error:
            status = error.label()
            _log_failure(ask.request_id, error)
            raise
        except Exception as error:
            status = InternalError.label()
            log.exception("request failed by a bug request=%s", ask.request_id)
            raise InternalError(f"internal error: {type(error).__name__}: {error}") from error
        finally:
            self.metrics.open_requests.dec()
            self.metrics.count_request(status)
            self.metrics.request_duration_seconds.observe(time.monotonic() - received_s)
            span.set(request_id=ask.request_id, status=status, resumptions=ask.point.resumptions)
            span.end(error=None if status == "ok" else status)

    async def _prepared(self, ask: Ask, request_ids: tuple[str, ...], received_s: float, span: OpenSpan) -> Call:
        part = span.begin("prepare")
        part.start_s = span.start_s
        try:
            call = await self._prepare(ask, request_ids, received_s, span.context)
        except BaseException as error:
            part.end(error=repr(error))
            raise
        part.set(prompts=len(call.requests), prompt_tokens=sum(len(request.prompt) for request in call.requests))
        part.end()
        return call

    async def _prepare(self, ask: Ask, request_ids: tuple[str, ...], received_s: float, trace: TraceContext) -> Call:
        if self.dispatcher.is_draining:
            raise Draining("this router takes no new requests: it is shutting down")
        facts = self.dispatcher.facts
        requests, salt, n = [], owner_salt(ask.tenant, ask.cache_salt), ask.options.n
        for rank, (request_id, prompt) in enumerate(zip(request_ids, ask.prompts, strict=True)):
            sent = ask.point.sent[rank * n : (rank + 1) * n]
            check_prompt(prompt, facts)
            length = answer_length(prompt, ask.options, facts)
            tokens = tuple(prompt.ids)
            await asyncio.sleep(0)  # of a thousand prompts each takes a moment
            requests.append(
                GenerationRequest(
                    request_id=request_id,
                    prompt=tokens,
                    salt=salt,
                    public_blocks=self._public.blocks_of(tokens, facts.block_size),
                    sampling=sampling_params(ask.options, length, facts, self._seeds.of(ask.point, rank)),
                    deadline_s=ask.deadline_s,
                    priority=ask.priority,
                    tenant=ask.tenant or ask.user,
                    siblings=Siblings(rank * ask.options.n, len(ask.prompts) * ask.options.n),
                    resumptions=ask.point.resumptions,
                    settled=frozenset(choice for choice, one in enumerate(sent) if one.is_finished),
                    is_resumable=ask.is_resumable,
                    trace=trace,
                )
            )
        return Call(ask, tuple(requests), facts, received_s)

    @contextlib.contextmanager
    def _named(self, ask: Ask) -> Iterator[tuple[str, ...]]:
        """The dispatcher's ids of the ask's prompts, while it is open."""
        name, point, tenant = ask.request_id, ask.point, ask.visit.tenant
        if (tenant, name) in self._open and not point.resumptions:
            if not ask.may_rename:
                raise InvalidRequest(f"request_id {name!r} is that of another open request", field="request_id")
            name = f"{name}-{uuid.uuid4().hex[:8]}"
        several = len(ask.prompts) > 1
        parts = tuple(f"{point.stream}/{rank}" if several else point.stream for rank in range(len(ask.prompts)))
        is_id_secret = ask.is_id_drawn and not point.resumptions
        opened = _OpenRequest(tenant=tenant, parts=parts, is_id_enough=tenant is not None or is_id_secret)
        self._open[tenant, name] = self._streams[point.stream] = opened
        try:
            yield parts
        finally:
            if self._open.get((tenant, name)) is opened:
                del self._open[tenant, name]
            if self._streams.get(point.stream) is opened:
                del self._streams[point.stream]


class _Answer:
    """One call on its way: counts what it sends, and knows which event is the last."""

    def __init__(self, front: Front, call: Call, sink: Sink) -> None:
        self._front = front
        self._call = call
        self._sink = sink
        self._point = call.ask.point
        settled = [sent for sent in self._point.sent if sent.is_finished]
        self._choices_left = len(self._point.sent) - len(settled)
        self._completion_tokens = sum(sent.tokens or 0 for sent in settled)
        self._cached_tokens = 0
        self._has_token = self._point.resumptions > 0
        self._stops = StopStrings(call.ask.options.stop)
        self._prompts = [
            rank for rank, request in enumerate(call.requests) if len(request.settled) < call.ask.options.n
        ]
        """Those with something left to say."""

    async def run(self) -> None:
        if not self._prompts:
            if not self._point.is_complete:
                await self._sink(TextEvent(0, "", usage=self._usage(), is_sent=True))
            return
        if len(self._prompts) == 1:
            await self._run_prompt(self._prompts[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for rank in self._prompts:
                    group.create_task(self._run_prompt(rank))
                    await asyncio.sleep(0)  # each begins with a step of its own
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_prompt(self, rank: int) -> None:
        request, options = self._call.requests[rank], self._call.ask.options
        self._call.ask.visit.spend(len(request.prompt))
        if not request.resumptions:
            self._front.metrics.prompt_tokens_total.inc(len(request.prompt))
        first = rank * options.n
        choices = {
            choice: _Choice(
                self._front.text, self._call, request, self._stops, self._point.sent[first + choice].tokens or 0
            )
            for choice in range(options.n)
            if choice not in request.settled
        }
        cached: dict[int, int] = {}
        share, client = self._front.share, self._call.ask.tenant or self._point.stream
        async with contextlib.aclosing(self._front.dispatcher.generate(request)) as events:
            async for event in events:
                if share.is_over:
                    await share.turn(client)
                choice = choices[event.index]
                if isinstance(event, TokenEvent):
                    await self._take_token(choice, event, request, first + event.index)
                elif not choice.is_finished:
                    cached[event.index] = event.cached_tokens
                    if len(cached) == len(choices):
                        self._count_cached(min(cached.values()))
                    await self._finish(choice, event, request, first + event.index)
        if not all(choice.is_finished for choice in choices.values()):
            raise InternalError(f"the answer stream of {request.request_id} ended without a finish reason")

    async def _take_token(self, choice: _Choice, event: TokenEvent, request: GenerationRequest, index: int) -> None:
        if choice.is_stopped:
            return
        self._completion_tokens += 1
        scanned = choice.feed(event)
        is_sent = event.position < choice.sent_tokens
        if not is_sent:
            self._call.ask.visit.spend(1)
            self._observe(choice)
        await self._sink(
            TextEvent(
                index,
                scanned.text,
                token=event.token,
                is_sent=is_sent,
                prompt_tokens=len(request.prompt),
                choice_tokens=choice.tokens,
            )
        )
        if scanned.stopped:
            await self._front.dispatcher.finish_early(request, event.index)

    async def _finish(self, choice: _Choice, event: FinishEvent, request: GenerationRequest, index: int) -> None:
        rest = choice.finish()
        reason = FinishReason.STOP if choice.is_stopped else event.reason
        if reason is FinishReason.ERROR:
            raise InternalError("a worker ended the answer with an error it did not name")
        if choice.tokens < choice.sent_tokens:
            raise InvalidRequest("the stream that is to be resumed answers another request", field="resume_from")
        self._choices_left -= 1
        usage = self._usage() if self._choices_left == 0 else None
        end = TextEvent(
            index,
            rest,
            finish=reason,
            usage=usage,
            prompt_tokens=len(request.prompt),
            choice_tokens=choice.tokens,
        )
        await self._sink(end)
        if usage is not None:
            log.info(
                "request done request=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d ms=%.1f",
                self._call.ask.request_id,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                1000 * (time.monotonic() - self._call.received_s),
            )

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(request.prompt) for request in self._call.requests)
        return Usage(prompt_tokens, self._completion_tokens, self._cached_tokens)

    def _count_cached(self, tokens: int) -> None:
        """Of several choices for one prompt the later ones always reuse the first: the least is what was there."""
        self._cached_tokens += tokens
        self._front.metrics.cached_tokens_total.inc(tokens)

    def _observe(self, choice: _Choice) -> None:
        now, metrics = time.monotonic(), self._front.metrics
        metrics.generation_tokens_total.inc()
        if choice.last_token_s is not None:
            metrics.inter_token_latency_seconds.observe(now - choice.last_token_s)
        elif not self._has_token:
            self._has_token = True
            metrics.ttft_seconds.observe(now - self._call.received_s)
        choice.last_token_s = now


class _Choice:
    """The text of one choice and whether it has come to its end."""

    def __init__(
        self, text: Text, call: Call, request: GenerationRequest, stops: StopStrings, sent_tokens: int
    ) -> None:
        options = call.ask.options
        self.sent_tokens = sent_tokens
        """That the client has already."""
        self.tokens = 0
        self._text = AnswerText(
            text.decoder(request.prompt, skip_special_tokens=options.skip_special_tokens),
            StopScanner(stops, include_stop=options.include_stop_str_in_output),
            unscanned_tokens=options.min_tokens,
        )
        self._min_tokens = options.min_tokens
        ends = frozenset(options.stop_token_ids) | (
            frozenset() if options.ignore_eos else frozenset(call.facts.eos_token_ids)
        )
        self._mute = frozenset() if options.include_stop_str_in_output else ends
        """Tokens that end the answer: counted, but not part of its text."""
        self.is_stopped = False
        self.is_finished = False
        self.last_token_s: float | None = None

    def feed(self, event: TokenEvent) -> Scanned:
        self.tokens += 1
        if event.token.token in self._mute and event.position + 1 >= self._min_tokens:
            return Scanned("", stopped=False)
        scanned = self._text.feed(event.token.token)
        self.is_stopped = scanned.stopped
        return scanned

    def finish(self) -> str:
        self.is_finished = True
        if self.is_stopped:
            return ""
        scanned = self._text.flush()
        self.is_stopped = scanned.stopped
        return scanned.text


def _log_failure(request_id: str, error: ServeError) -> None:
    log.info("request failed request=%s error=%s message=%s", request_id, error.label(), error.message)


@contextlib.asynccontextmanager
async def _until(deadline_s: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded inside once `deadline_s` (Unix seconds) is reached."""
    left_s = None if deadline_s is None else deadline_s - time.time()
    if left_s is not None and left_s <= 0:
        raise DeadlineExceeded("the deadline had passed before the request came in")
    try:
        async with asyncio.timeout(left_s) as timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise DeadlineExceeded("the deadline passed before the answer was complete") from error
