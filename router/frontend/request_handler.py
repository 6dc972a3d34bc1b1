"""The path that every request takes, whichever protocol it came by: prompts to the dispatcher, tokens back to text."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.fleet.serving_facts import ServingFacts
from router.fleet.worker_link import TokenDelta
from router.frontend.auth.auth import AuthContext
from router.frontend.output.events import Sink, TextEvent, Usage
from router.frontend.output.parsed_text import ParsedText
from router.frontend.output_share import AT_ONCE, OutputShare
from router.frontend.params import ClientRequest, TokenPrompt, answer_length, check_prompt, sampling_params
from router.frontend.preparation.prepare import Work, check_model
from router.frontend.preparation.preparer import Preparer
from router.frontend.public_prefixes import PublicPrefixes
from router.frontend.resume import Seeds, stream_of
from router.frontend.structured.compiled import CompiledGrammars
from router.frontend.text.detokenize import OutputText
from router.frontend.text.stop_strings import StopScanner, StopStrings
from router.metrics import RouterMetrics
from router.serving.generate_request import Dispatcher, GenerateRequest
from twostroke.errors import Cancelled, DeadlineExceeded, Draining, InternalError, InvalidRequest, ServeError
from twostroke.fault_points import Point, reach
from twostroke.kv_cache.block import adapter_salt, exact_salt, owner_salt
from twostroke.models.catalog.recommended import UNKNOWN, Recommended
from twostroke.request import AdapterRef, CacheHint, FinishReason, PromptLogprobs, SampledToken, Siblings
from twostroke.tracing.context import TraceContext
from twostroke.tracing.recorder import Recorder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenIds:
    """How an open request may be aborted."""

    tenant: str | None
    """The tenant of the API key. None: no key was asked for."""
    parts: tuple[str, ...]
    """Ids of its prompts at the dispatcher."""
    is_id_enough: bool
    """The request's id is enough to abort it."""


class RequestHandler:
    """Owns the ids of open requests; everything else about them belongs to the dispatcher."""

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
        self.public = public or PublicPrefixes()
        self._seeds = seeds or Seeds()
        self._recorder = recorder or Recorder()
        self.share = OutputShare()
        self._preparer = preparer
        self._grammars = CompiledGrammars(preparer, metrics)
        self._open: dict[tuple[str | None, str], _OpenIds] = {}
        """Open requests by tenant of the API key, if any, and the client's request id."""
        self._streams: dict[str, _OpenIds] = {}
        """Open requests by name of the stream."""

    def check_model(self, model: str | None) -> None:
        check_model(model, self.model, self.dispatcher.adapters)

    async def prepare(
        self,
        kind: str,
        body: bytes,
        auth: AuthContext,
        *,
        client: str,
        request_id: str = "",
        deadline_s: float | None = None,
        path_fields: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """Returns what preparation makes of a request. Tokens that were counted for nothing are charged, too.

        `client` takes turns with others where no API key names a tenant. `request_id`, for the log, and `deadline_s`,
        in Unix seconds, are given where they are known before the body is read.
        """
        self._refuse_if_draining()
        dispatcher = self.dispatcher
        work = Work(
            kind, body, self.model, dispatcher.facts, frozenset(dispatcher.adapters), path_fields, self.text.formats
        )
        try:
            async with _until(deadline_s):
                outcome = await self._preparer.prepare(work, auth.tenant or client)
            if outcome.error is not None or isinstance(outcome.value, bytes):
                auth.spend(outcome.tokens)
            if outcome.error is not None:
                raise outcome.error
        except ServeError as error:
            self.metrics.count_request(error.label())
            _log_failure(request_id, error)
            raise
        return outcome.value

    async def pinned_prefix(self, body: bytes) -> tuple[array[int], int]:
        """Returns the tokens of a pin's prefix, for an AddPinRequest as its bytes, and how many of them are public.

        Raises InvalidRequest, or ContextLengthExceeded.
        """
        facts = self.dispatcher.facts
        outcome = await self._preparer.prepare(Work("pinned_prefix", body, self.model, facts), "")
        if outcome.error is not None:
            raise outcome.error
        tokens: array[int] = outcome.value
        check_prompt(TokenPrompt(tokens), facts)
        return tokens, self.public.blocks_of(tokens, facts.block_size) * facts.block_size

    def adapter(self, model: str) -> AdapterRef | None:
        """Returns the adapter that is served under a name now. Raises NotFound for a name that leads to nothing."""
        self.check_model(model)
        served = self.dispatcher.adapters.get(model)
        return None if served is None else served.ref

    async def abort(self, request_id: str, resume_token: str, auth: AuthContext) -> bool:
        """Ends the request of that id, or the one whose stream the token names. Returns False where there is none.

        Without API keys an id that a client chose is not enough: others can guess it.
        """
        if resume_token:
            opened = self._streams.get(stream_of(resume_token))
        else:
            opened = self._open.get((auth.tenant, request_id))
        if opened is None or opened.tenant != auth.tenant or not (resume_token or opened.is_id_enough):
            return False
        aborted = [await self.dispatcher.abort(part) for part in opened.parts]
        return any(aborted)

    async def answer(self, request: ClientRequest, sink: Sink) -> None:
        """Gives every event of the output to `sink`. Raises ServeError; cancelling this call cancels everywhere."""
        status = Cancelled.label()
        span = self._recorder.root("request", request.point.stream, request.traceparent)
        span.start_s -= time.monotonic() - request.received_s
        self.metrics.open_requests.inc()
        try:
            async with _until(request.deadline_s):
                request.auth.widen(request.open_choices)
                with self._named(request) as ids:
                    with span.part("prepare") as part:
                        part.start_s = span.start_s
                        facts, requests = await self._requests(request, ids, span.context)
                        part.set(prompts=len(requests), prompt_tokens=sum(len(each.prompt) for each in requests))
                    reach(Point.ROUTER_RECEIVED)
                    await _Output(self, request, requests, facts, sink).run()
            status = "ok"
        except asyncio.CancelledError:
            log.info("request cancelled request=%s", request.request_id)
            raise
        except ServeError as error:
            status = error.label()
            _log_failure(request.request_id, error)
            raise
        except Exception as error:
            status = InternalError.label()
            log.exception("request failed by a bug request=%s", request.request_id)
            raise InternalError(f"internal error: {type(error).__name__}: {error}") from error
        finally:
            self.metrics.open_requests.dec()
            self.metrics.count_request(status)
            self.metrics.request_duration_seconds.observe(time.monotonic() - request.received_s)
            span.set(request_id=request.request_id, status=status, resumptions=request.point.resumptions)
            span.end(error=None if status == "ok" else status)

    def _refuse_if_draining(self) -> None:
        if self.dispatcher.is_draining:
            raise Draining("this router takes no new requests: it is shutting down")

    async def _requests(
        self, request: ClientRequest, ids: tuple[str, ...], trace: TraceContext
    ) -> tuple[ServingFacts, tuple[GenerateRequest, ...]]:
        """Makes one request for the dispatcher of each prompt, after every check that the frontend can make."""
        self._refuse_if_draining()
        facts, options = self.dispatcher.facts, request.options
        adapter = self.adapter(request.model)
        salt, is_apart = _salt(request, facts, adapter)
        grammar = None
        if options.structured is not None:
            compiled = await self._grammars.of(options.structured, request.tenant or request.user)
            grammar = compiled.grammar
        requests = []
        for rank, (request_id, prompt) in enumerate(zip(ids, request.prompts, strict=True)):
            sent = request.point.sent[rank * options.n : (rank + 1) * options.n]
            check_prompt(prompt, facts)
            length = answer_length(prompt, options, facts, clamps=request.clamps_length)
            tokens = tuple(prompt.ids)
            await asyncio.sleep(0)  # each of a thousand prompts takes a moment
            requests.append(
                GenerateRequest(
                    request_id=request_id,
                    prompt=tokens,
                    adapter=adapter,
                    salt=salt,
                    public_blocks=0 if is_apart else self.public.blocks_of(tokens, facts.block_size),
                    takes_converted=not request.needs_exact,
                    cache_key=_cache_key(request),
                    hints=tuple(CacheHint(hint.tokens // facts.block_size, hint.seconds) for hint in prompt.hints),
                    sampling=sampling_params(options, length, facts, self._seeds.of(request.point, rank), grammar),
                    deadline_s=request.deadline_s,
                    priority=request.priority,
                    tenant=request.tenant or request.user,
                    hint_tenant=request.tenant,
                    siblings=Siblings(rank * options.n, len(ids) * options.n),
                    resumptions=request.point.resumptions,
                    ended_choices=frozenset(choice for choice, one in enumerate(sent) if one.is_finished),
                    is_resumable=request.is_resumable,
                    trace=trace,
                )
            )
        return facts, tuple(requests)

    @contextlib.contextmanager
    def _named(self, request: ClientRequest) -> Iterator[tuple[str, ...]]:
        """Gives the dispatcher's ids of the request's prompts, and keeps them while it is open."""
        name, point, tenant = request.request_id, request.point, request.auth.tenant
        if (tenant, name) in self._open and not point.resumptions:
            if not request.may_rename:
                raise InvalidRequest(f"request_id {name!r} is that of another open request", field="request_id")
            name = f"{name}-{uuid.uuid4().hex[:8]}"
        several = len(request.prompts) > 1
        parts = tuple(f"{point.stream}/{rank}" if several else point.stream for rank in range(len(request.prompts)))
        is_id_secret = request.is_id_drawn and not point.resumptions
        opened = _OpenIds(tenant=tenant, parts=parts, is_id_enough=tenant is not None or is_id_secret)
        self._open[tenant, name] = self._streams[point.stream] = opened
        try:
            yield parts
        finally:
            if self._open.get((tenant, name)) is opened:
                del self._open[tenant, name]
            if self._streams.get(point.stream) is opened:
                del self._streams[point.stream]


class _Output:
    """The output of one client request: counts what it sends, and knows which event is the last."""

    def __init__(
        self,
        handler: RequestHandler,
        request: ClientRequest,
        requests: tuple[GenerateRequest, ...],
        facts: ServingFacts,
        sink: Sink,
    ) -> None:
        self._handler = handler
        self._share = handler.share
        self._sent_tokens = handler.metrics.sent_tokens
        self._client_request = request
        self._requests = requests
        self._facts = facts
        self._sink = sink
        self._point = request.point
        ended = [sent for sent in self._point.sent if sent.is_finished]
        self._choices_left = len(self._point.sent) - len(ended)
        self._completion_tokens = sum(sent.tokens or 0 for sent in ended)
        self._cached_tokens = 0
        self._has_token = self._point.resumptions > 0
        self._stops = StopStrings(request.options.stop)

    async def run(self) -> None:
        n = self._client_request.options.n
        ranks = [rank for rank, request in enumerate(self._requests) if len(request.ended_choices) < n]
        if not ranks:
            if not self._point.is_complete:
                self._sink.put(TextEvent(0, "", usage=self._usage(), is_sent=True))
                await self._sink.drain()
            return
        if len(ranks) == 1:
            await self._run_prompt(ranks[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for rank in ranks:
                    group.create_task(self._run_prompt(rank))
                    await asyncio.sleep(0)  # each begins with a step of its own
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_prompt(self, rank: int) -> None:
        request, handler = self._requests[rank], self._handler
        self._client_request.auth.spend(len(request.prompt))
        if not request.resumptions:
            handler.metrics.prompt_tokens_total.inc(len(request.prompt))
        prompt = _Prompt(request, self._choices(rank))
        cached: dict[int, int] = {}
        deltas = handler.dispatcher.generate(request, partial(self._take_at_once, prompt))
        async with contextlib.aclosing(deltas):
            async for number, delta in deltas:
                prompt.waits = True
                choice = prompt.choices[number]
                for position, token in enumerate(delta.tokens, delta.position):
                    await self._turn()
                    self._take_token(prompt, number, token, position, delta.prompt_logprobs)
                    await self._sink.drain()
                if delta.finish is not None and not choice.is_finished:
                    await self._turn()
                    cached[number] = delta.cached_tokens
                    if len(cached) == len(prompt.choices):  # the later choices of a prompt always reuse the first
                        self._cached_tokens += min(cached.values())
                        handler.metrics.cached_tokens_total.inc(min(cached.values()))
                    self._finish(choice, delta.finish)
                    await self._sink.drain()
                prompt.waits = False
        if not all(choice.is_finished for choice in prompt.choices.values()):
            raise InternalError(f"the output of {request.request_id} ended without a finish reason")

    async def _turn(self) -> None:
        if self._share.is_over:
            await self._share.turn(self._client_request.tenant or self._point.stream)

    def _take_at_once(self, prompt: _Prompt, number: int, delta: TokenDelta) -> bool:
        """Sends tokens as they arrive. Returns False where they have to wait: for earlier ones, or for the client."""
        if prompt.waits or not self._sink.is_ready or len(delta.tokens) > AT_ONCE or self._share.is_over:
            return False
        for position, token in enumerate(delta.tokens, delta.position):
            self._take_token(prompt, number, token, position, delta.prompt_logprobs)
        self._sink.flush()
        return True

    def _choices(self, rank: int) -> dict[int, _Choice]:
        """Returns the choices of one prompt that have something left to say."""
        request, options = self._requests[rank], self._client_request.options
        ends = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            ends |= frozenset(self._facts.eos_token_ids)
        choices = {}
        includes_stop = options.include_stop_str_in_output
        for number in set(range(options.n)) - request.ended_choices:
            scanner = StopScanner(self._stops, include_stop=includes_stop) if options.stop else None
            mute = frozenset[int]() if includes_stop else ends
            index = rank * options.n + number
            text = self._output_text(rank, index, scanner, mute)
            choices[number] = _Choice(index, len(request.prompt), text, self._point.sent[index].tokens or 0)
        return choices

    def _output_text(
        self, rank: int, choice: int, scanner: StopScanner | None, mute: frozenset[int]
    ) -> OutputText | ParsedText:
        prompt, options = self._requests[rank].prompt, self._client_request.options
        parsing, skips = self._client_request.prompts[rank].parsing, options.skip_special_tokens
        if parsing is None:
            decoder = self._handler.text.decoder(prompt, skip_special_tokens=skips)
            return OutputText(decoder, scanner, mute=mute, min_tokens=options.min_tokens)
        decoder = self._handler.text.decoder(prompt, skip_special_tokens=skips, kept=parsing.special)
        text = OutputText(decoder, None, mute=mute, min_tokens=options.min_tokens)
        parser = parsing.parser(self._point.stream, choice)
        return ParsedText(text, parser, scanner, min_tokens=options.min_tokens)

    def _take_token(
        self, prompt: _Prompt, number: int, token: SampledToken, position: int, scores: PromptLogprobs | None
    ) -> None:
        """Gives one token to the sink. Where a stop string ends its choice with it, no more are asked for.

        `scores` are the prompt's, if there are any: they go with the token at position 0.
        """
        choice = prompt.choices[number]
        text = choice.text
        if choice.text.is_stopped:
            return
        scores = None if position else scores
        if self._client_request.options.is_prompt_only:
            choice.prompt_logprobs = scores
            return
        self._completion_tokens += 1
        new = text.feed(token.token)
        is_sent = position < choice.sent_tokens
        if not is_sent:
            self._client_request.auth.spend(1)
            now, last = time.monotonic(), choice.last_token_s
            choice.last_token_s = now
            self._sent_tokens.add(None if last is None else now - last)
            if not self._has_token:
                self._has_token = True
                self._handler.metrics.ttft_seconds.observe(now - self._client_request.received_s)
        event = TextEvent(choice.index, new, choice.prompt_tokens, text.tokens, token, None, None, is_sent, text.parts)
        self._sink.put(event if scores is None else event._replace(prompt_logprobs=scores))
        if text.is_stopped:
            self._handler.dispatcher.finish_early(prompt.request, number)

    def _finish(self, choice: _Choice, reason: FinishReason) -> None:
        choice.is_finished = True
        rest = choice.text.flush()
        if choice.text.is_stopped:
            reason = FinishReason.STOP
        if reason is FinishReason.STOP and self._client_request.options.is_prompt_only:
            reason = FinishReason.LENGTH  # whatever the token was that is not shown
        if reason is FinishReason.ERROR:
            raise InternalError("a worker ended the answer with an error it did not name")
        if choice.text.tokens < choice.sent_tokens:
            raise InvalidRequest("the stream that is to be resumed answers another request", field="resume_from")
        self._choices_left -= 1
        usage = self._usage() if self._choices_left == 0 else None
        counts = choice.prompt_tokens, choice.text.tokens
        parts, stop = choice.text.parts, choice.text.stop_string
        event = TextEvent(choice.index, rest, *counts, finish=reason, usage=usage, parts=parts, stop_string=stop)
        self._sink.put(event._replace(prompt_logprobs=choice.prompt_logprobs))
        if usage is not None:
            log.info(
                "request done request=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d ms=%.1f",
                self._client_request.request_id,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                1000 * (time.monotonic() - self._client_request.received_s),
            )

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(request.prompt) for request in self._requests)
        return Usage(prompt_tokens, self._completion_tokens, self._cached_tokens)


@dataclass(slots=True)
class _Choice:
    """One choice that has something left to say."""

    index: int
    prompt_tokens: int
    text: OutputText | ParsedText
    sent_tokens: int
    """Tokens that the client has already."""
    is_finished: bool = False
    last_token_s: float | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Kept for its end, where no token of it is shown."""


@dataclass(slots=True)
class _Prompt:
    """One prompt that is being answered."""

    request: GenerateRequest
    choices: dict[int, _Choice]
    waits: bool = False
    """Tokens of it wait for their turn, or for the client: what comes now must not overtake them."""


def _salt(request: ClientRequest, facts: ServingFacts, adapter: AdapterRef | None) -> tuple[bytes, bool]:
    """Returns the salt of a request's blocks, and whether not even public prefixes are shared with others."""
    salt = owner_salt(request.tenant, request.cache_salt)
    is_exact = request.needs_exact and facts.kv_form.converted_from is not None
    if is_exact:
        salt = exact_salt(salt)
    if adapter is not None:
        salt = adapter_salt(salt, adapter.digest)
    return salt, is_exact or adapter is not None


def _cache_key(request: ClientRequest) -> bytes:
    """Returns a digest of the client's hint, 16 bytes; tenants that use the same words do not meet by it."""
    if not request.prompt_cache_key:
        return b""
    named = f"{request.tenant}\0{request.prompt_cache_key}".encode()
    return hashlib.blake2b(named, digest_size=16, person=b"prompt cache key").digest()


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
