"""Messages of one answer over gRPC: in order, one at a time, and without a wait where the client keeps up."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.frontend.grpc.messages import Messages
from router.frontend.output_share import AT_ONCE
from router.frontend.params import ClientRequest, TokenPrompt
from router.frontend.request_handler import TextEvent, Usage
from router.frontend.resume import StreamPoint
from router.frontend.text.tokenizer import ByteText
from twostroke.request import FinishReason, SampledToken
from twostroke.rpc.v1 import inference_pb2


class SlowContext:
    """A call whose client reads only when it is let."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.begun: list[inference_pb2.GenerateResponse] = []
        self.written: list[inference_pb2.GenerateResponse] = []
        self.failure: Exception | None = None

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        assert len(self.begun) == len(self.written), "one is on its way"
        self.begun.append(message)
        await self.reads.wait()
        await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        self.written.append(message)

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.written]


def messages_to(context: SlowContext, choices: int = 1) -> Messages:
    request = ClientRequest(point=StreamPoint.begin("r", choices), is_resumable=True, prompts=(TokenPrompt((1,)),))
    return Messages(request, ByteText(), context)  # type: ignore[arg-type]  # the one method that is called


def token_of(text: str, choice: int = 0, logprob: float | None = None) -> TextEvent:
    return TextEvent(choice, text, token=SampledToken(ord(text), logprob))


async def test_a_message_leaves_without_a_wait_and_the_next_ones_wait_for_it() -> None:
    context = SlowContext()
    messages = messages_to(context)
    messages.put(TextEvent(0, "a", finish=FinishReason.STOP))
    messages.flush()
    assert len(context.begun) == 1, "it leaves before anything else of the loop runs"
    for text in "bc":
        messages.put(TextEvent(0, text, finish=FinishReason.STOP))
    drained = asyncio.create_task(messages.drain())
    beaten = asyncio.create_task(messages.beat())
    await asyncio.sleep(0.01)
    assert len(context.begun) == 1
    assert not drained.done()
    context.reads.set()
    await asyncio.gather(drained, beaten)
    assert context.texts == ["a", "b", "c", ""]
    assert (messages.is_ready, messages.is_started) == (True, True)
    assert messages.sent_s <= time.monotonic()


async def test_tokens_that_wait_leave_in_order_each_in_a_message_that_names_it() -> None:
    context = SlowContext()
    messages = messages_to(context, choices=2)
    events = [token_of("a"), token_of("b"), token_of("c"), token_of("x", choice=1), token_of("d"), token_of("e")]
    for event in [*events, token_of("f", logprob=-1.0), token_of("g"), TextEvent(0, "!", finish=FinishReason.LENGTH)]:
        messages.put(event)
        messages.flush()
    context.reads.set()
    await messages.drain()
    assert context.texts == ["a", "b", "c", "x", "d", "e", "f", "g", "!"]
    assert [bytes(message.token_ids).decode() for message in context.written] == [*"abcxdefg", ""]
    assert [message.index for message in context.written] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [len(message.logprobs) for message in context.written] == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    sent = [message.resume_token.rpartition(":")[2] for message in context.written]
    assert sent == ["1,-", "2,-", "3,-", "3,1", "4,1", "5,1", "6,1", "7,1", "7e,1"]


async def test_the_end_of_the_stream_is_named_after_all_that_left_before_it() -> None:
    context = SlowContext()
    messages = messages_to(context)
    context.reads.set()
    for event in (token_of("a"), token_of("b"), TextEvent(0, "", finish=FinishReason.STOP, usage=Usage(1, 2, 0))):
        assert not messages.has_end
        messages.put(event)
    await messages.drain()
    assert messages.has_end
    end = messages.end()
    assert (end.finish_reason, end.usage.completion_tokens) == ("stop", 2)
    assert end.resume_token.endswith(":2e")


async def test_a_client_that_does_not_read_is_waited_for_after_a_few_tokens() -> None:
    context = SlowContext()
    messages = messages_to(context)
    for count in range(AT_ONCE + 1):
        assert messages.is_ready, f"after {count} tokens"
        messages.put(token_of("a"))
        messages.flush()
    assert not messages.is_ready
    assert len(context.begun) == 1
    drained = asyncio.create_task(messages.drain())
    await asyncio.sleep(0.01)
    assert not drained.done()
    context.reads.set()
    await drained
    assert messages.is_ready
    assert "".join(context.texts) == "a" * (AT_ONCE + 1)


async def test_a_message_that_cannot_be_written_fails_the_answer_and_not_its_neighbours() -> None:
    context = SlowContext()
    messages = messages_to(context)
    context.failure = RuntimeError("the call has ended")
    context.reads.set()
    messages.put(token_of("a"))
    messages.flush()
    await asyncio.sleep(0.01)
    assert not messages.is_ready
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended"):
            await messages.drain()
    messages.close()


async def test_whoever_waits_for_a_message_learns_that_it_could_not_be_written() -> None:
    context = SlowContext()
    messages = messages_to(context)
    context.failure = RuntimeError("the call has ended")
    messages.put(token_of("a"))
    drained, given_up = asyncio.create_task(messages.drain()), asyncio.create_task(messages.drain())
    await asyncio.sleep(0)
    given_up.cancel()
    context.reads.set()
    with pytest.raises(RuntimeError, match="has ended"):
        await drained


async def test_a_closed_answer_begins_no_more_messages() -> None:
    context = SlowContext()
    messages = messages_to(context)
    for text in "abc":
        messages.put(token_of(text))
        messages.flush()
    messages.close()
    context.reads.set()
    await asyncio.sleep(0.01)
    assert context.texts == ["a"]
