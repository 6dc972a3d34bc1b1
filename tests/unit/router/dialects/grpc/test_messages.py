"""Messages of one answer over gRPC: in order, one at a time, and without a wait where the client keeps up."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.endpoints.grpc.service import _Messages
from router.requests.client_request import AnswerRequest, ClientRequest
from router.requests.params import AnswerOptions
from router.requests.resume import StreamPoint
from router.text.output.events import TextEvent
from router.text.prompts import TokenPrompt
from router.text.tokenizer import ByteText
from twostroke.rpc.v1 import inference_pb2


class SlowContext:
    """A call whose client reads only when it is let."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.begun: list[str] = []
        self.written: list[str] = []
        self.failure: Exception | None = None

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        assert len(self.begun) == len(self.written), "one is on its way"
        self.begun.append(message.text)
        await self.reads.wait()
        if self.failure is not None:
            raise self.failure
        self.written.append(message.text)


def messages_to(context: SlowContext) -> _Messages:
    body = AnswerRequest(prompts=(TokenPrompt((1,)),), options=AnswerOptions())
    request = ClientRequest(body=body, point=StreamPoint.begin("r", 1), is_resumable=True)
    return _Messages(request, ByteText(), context)  # type: ignore[arg-type]  # the one method that is called


async def test_a_message_leaves_without_a_wait_and_the_next_ones_wait_for_it() -> None:
    context = SlowContext()
    messages = messages_to(context)
    messages.put(TextEvent(0, "a"))
    messages.flush()
    assert not messages.is_ready
    for text in "bc":
        messages.put(TextEvent(0, text))
    drained = asyncio.create_task(messages.drain())
    beaten = asyncio.create_task(messages.writer.beat())
    await asyncio.sleep(0.01)
    assert context.begun == ["a"]
    assert not drained.done()
    context.reads.set()
    await asyncio.gather(drained, beaten)
    assert context.written == ["a", "b", "c", ""]
    assert (messages.is_ready, messages.writer.is_started) == (True, True)
    assert messages.writer.sent_s <= time.monotonic()


async def test_a_message_that_cannot_be_written_fails_the_answer_and_not_its_neighbours() -> None:
    context = SlowContext()
    messages = messages_to(context)
    context.failure = RuntimeError("the call has ended")
    context.reads.set()
    messages.put(TextEvent(0, "a"))
    messages.flush()
    await asyncio.sleep(0.01)
    assert not messages.is_ready
    with pytest.raises(RuntimeError, match="has ended"):
        await messages.drain()
    await messages.writer.close()
