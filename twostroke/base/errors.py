"""Every error that a user or a peer can meet.

    ServeError
    ├── ConfigError              a flag, file or machine is not as it must be; nothing was started
    │   └── UnsupportedModel     the architecture or a feature of it is not served here
    ├── InvalidRequest           the request cannot be served as written; names the field
    │   ├── UnsupportedFeature   well formed, but this server does not do that
    │   ├── RequestTooLarge      more bytes than one message may have
    │   ├── UnsupportedMediaType  a body that does not say it is JSON
    │   ├── Forbidden            a web page that may not call this server
    │   ├── MisdirectedRequest   asked by a name that is not this server's
    │   └── ContextLengthExceeded  more tokens of prompt and answer than the model or a page pool takes
    ├── NotFound                 no such model, request or worker
    ├── Overloaded               a bounded queue is full; retry later          (retryable)
    │   └── RateLimitExceeded    the API key has used what it may; retry later (retryable)
    ├── PinRefused               a pin does not fit the caps; its message has the numbers
    ├── Draining                 the process takes no new work                 (retryable)
    ├── DeadlineExceeded         the request's own deadline has passed
    ├── Cancelled                the client went away or aborted
    ├── PeerLost                 a worker or link died                         (retryable)
    │   └── EngineLost           a worker's engine or device has failed; it ends and is replaced (retryable)
    │       └── RankLost         a rank of a worker has died, is frozen or has failed; so has its worker (retryable)
    ├── WeightsChanged           the weights that an answer was begun with were replaced; begin anew (for clients)
    ├── StepFailed               a worker could not compute this request; tried at one other (retryable)
    ├── TransferFailed           pages did not arrive as announced             (retryable)
    ├── FingerprintMismatch      two workers do not serve the same KV
    ├── StaleEpoch               an earlier epoch of a worker spoke, or was spoken to
    ├── Unauthenticated          the cluster token is missing or wrong
    │   └── InvalidApiKey        no API key, or none that is good
    └── InternalError            our bug
        └── NonFiniteLogits      the model's numbers overflowed for this request, as they would anywhere

`assert` is for our bugs, `ServeError` for the world. Each class says how it leaves the process: its gRPC status, HTTP
status and OpenAI error type, and whether the same call may be tried again.
"""

from __future__ import annotations

import re
from typing import ClassVar, TypeVar

from twostroke.base.client_text import without_middle

E = TypeVar("E", bound=BaseException)

MOST_MESSAGE = 4000
"""Most characters of a message, which may say what a client sent, or the last lines of a log."""


class ServeError(Exception):
    """Root of the tree. `field` names the offending field or flag where there is one."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None) -> None:
        message = without_middle(message, MOST_MESSAGE)
        super().__init__(message)
        self.message = message
        self.field = field

    @classmethod
    def label(cls) -> str:
        """Returns the class in snake case, as metrics name it."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def code(self) -> str | None:
        """OpenAI's `code`. Clients tell errors of one status apart by it."""
        return self.label()


def without_frames(error: E) -> E:
    """Returns `error`, and what it was raised from, without the frames that they came through.

    Call it where an error becomes an answer. A frame that still names the error forms a cycle with it. All that such a
    frame holds, a request's body of megabytes among it, would stay until the garbage collector comes by.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


class ConfigError(ServeError):
    grpc_status = "FAILED_PRECONDITION"


class UnsupportedModel(ConfigError):
    pass


class InvalidRequest(ServeError):
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"

    @property
    def code(self) -> str | None:
        return None if type(self) is InvalidRequest else super().code


class UnsupportedFeature(InvalidRequest):
    grpc_status = "UNIMPLEMENTED"


class RequestTooLarge(InvalidRequest):
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413


class UnsupportedMediaType(InvalidRequest):
    http_status = 415


class Forbidden(InvalidRequest):
    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class MisdirectedRequest(InvalidRequest):
    http_status = 421


class ContextLengthExceeded(InvalidRequest):
    """The message contains "maximum context length is N tokens", which LiteLLM and agents read, and its code, which
    LangChain searches the message for."""

    def __init__(
        self, message: str, *, field: str | None = None, tokens: int | None = None, most_tokens: int | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.tokens = tokens
        """Tokens of prompt and answer together, or at least this many; None: not counted."""
        self.most_tokens = most_tokens
        """Most tokens that would have been taken, where `tokens` are counted."""


class NotFound(ServeError):
    grpc_status = "NOT_FOUND"
    http_status = 404
    openai_type = "invalid_request_error"

    @property
    def code(self) -> str | None:
        return "model_not_found" if self.field == "model" else super().code


class Overloaded(ServeError):
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "overloaded_error"
    retryable = True

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s
        """When the same call is predicted to be taken; None: no prediction."""


class RateLimitExceeded(Overloaded):
    openai_type = "rate_limit_error"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.reason = reason
        """Which limit: "requests", "tokens" or "concurrency"."""


class PinRefused(ServeError):
    """The field names the cap."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "overloaded_error"


class Draining(ServeError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    openai_type = "service_unavailable_error"
    retryable = True


class DeadlineExceeded(ServeError):
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"


class Cancelled(ServeError):
    grpc_status = "CANCELLED"
    http_status = 499
    openai_type = "cancelled_error"


class PeerLost(ServeError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    openai_type = "service_unavailable_error"
    retryable = True


class EngineLost(PeerLost):
    pass


class RankLost(EngineLost):
    pass


class WeightsChanged(ServeError):
    """No worker can continue the answer. A client that sends its request anew, and resumes nothing, is answered."""

    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    openai_type = "conflict_error"


class StepFailed(ServeError):
    retryable = True


class TransferFailed(ServeError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retryable = True


class FingerprintMismatch(ServeError):
    grpc_status = "FAILED_PRECONDITION"


class StaleEpoch(ServeError):
    grpc_status = "FAILED_PRECONDITION"


class Unauthenticated(ServeError):
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"


class InvalidApiKey(Unauthenticated):
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None, reason: str = "") -> None:
        super().__init__(message, field=field)
        self.reason = reason
        """What is wrong with it, for metrics."""


class InternalError(ServeError):
    pass


class NonFiniteLogits(InternalError):
    pass
