"""Proxies around a process's TCP connections, inside of it: SIGKILL and SIGSTOP take them along.

    peer  ->  [proxy] -> port        `announce`: peers are told the proxy's address instead of the port's
    process -> [proxy] ->  peer      `dial` for connections made by address, `carry` for a socket that is connected

Every connection has two threads, one for each direction: it receives a chunk, does to it what is wrong with the links
now, and sends it on. What is held back stays in the kernels' buffers, as on a wire, and flows when the links heal.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from tests.trials.chaos.injection.plan import Fault, Kind

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 10
PAGE_CHUNK_BYTES = 256
"""Larger chunks of a page connection have bytes of pages in their middle; hellos and status bytes come in smaller."""
SLOW_S = 0.05
"""Delay of every chunk over a slow link."""
SLOW_BYTES_PER_S = 1e6
DIAL_S = 5.0
_BACKLOG = 128


class Trouble:
    """What is wrong with all links of a process at the moment."""

    def __init__(self, hit: Callable[[Fault], None]) -> None:
        self._hit = hit
        self._changed = threading.Condition()
        self._held_until_s = 0.0
        self._slow_until_s = 0.0
        self._next: Fault | None = None
        """Happens to the next bytes of pages."""

    def begin(self, fault: Fault) -> None:
        until_s = time.monotonic() + fault.seconds
        with self._changed:
            match fault.kind:
                case Kind.PARTITION:
                    self._held_until_s = until_s
                case Kind.SLOW:
                    self._slow_until_s = until_s
                case _:
                    self._next = fault

    def end(self) -> None:
        with self._changed:
            self._held_until_s = self._slow_until_s = 0.0
            self._next = None
            self._changed.notify_all()

    def hold(self) -> None:
        """Returns when nothing is held back."""
        with self._changed:
            while (left_s := self._held_until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def delay_s(self, size: int) -> float:
        """Delay of a chunk of `size` bytes."""
        return SLOW_S + size / SLOW_BYTES_PER_S if time.monotonic() < self._slow_until_s else 0.0

    def take(self, *kinds: Kind) -> Kind | None:
        """What is to be done to the pages at hand, if it is one of `kinds`; once."""
        with self._changed:
            fault = self._next
            if fault is None or fault.kind not in kinds:
                return None
            self._next = None
        self._hit(fault)
        return fault.kind


class Links:
    """The proxies of one process. `hit` is told, on whichever thread, when bytes of pages are about to be spoilt."""

    def __init__(self, hit: Callable[[Fault], None]) -> None:
        self._trouble = Trouble(hit)
        self._proxies: dict[str, _Proxy] = {}
        self._lock = threading.Lock()

    def spoil(self, fault: Fault) -> None:
        self._trouble.begin(fault)

    def heal(self) -> None:
        self._trouble.end()

    def take_corruption(self) -> bool:
        """Whether a page that has just been copied from shared memory is to be spoilt: there is no wire to do it on."""
        return self._trouble.take(Kind.CORRUPT) is not None

    def announce(self, address: str, *, port: int = 0, pages: bool = False) -> str:
        """What peers are told of this process's port at `address`: a proxy on the same interface, at `port`.

        `pages`: what goes out of it are pages.
        """
        host, _ = _split(address)
        return self._open(host, port, address, pages)

    def dial(self, address: str) -> str:
        """What to connect to instead of a peer's `address`; to be given to `hang_up` in the end."""
        return self._open("127.0.0.1", 0, address, pages=False)

    def hang_up(self, dialled: str) -> None:
        with self._lock:
            proxy = self._proxies.pop(dialled, None)
        if proxy is not None:
            proxy.close()

    def carry(self, connected: socket.socket) -> socket.socket:
        """What to use instead of a socket that is connected to a peer's pages."""
        ours, near = socket.socketpair()
        _Passage(near, connected, self._trouble, pages=True).start()
        return ours

    def close(self) -> None:
        with self._lock:
            proxies = list(self._proxies.values())
            self._proxies.clear()
        for proxy in proxies:
            proxy.close()

    def _open(self, host: str, port: int, target: str, pages: bool) -> str:
        def let_in(near: socket.socket) -> None:
            self._trouble.hold()
            try:
                far = socket.create_connection(_split(target), DIAL_S)
            except OSError as error:
                log.debug("nobody answers behind a proxy address=%s error=%s", target, error)
                near.close()
                return
            far.settimeout(None)
            _Passage(near, far, self._trouble, pages).start()

        proxy = _Proxy(host, port, let_in)
        with self._lock:
            self._proxies[proxy.address] = proxy
        return proxy.address


class _Proxy:
    """A listening socket, and a thread that lets in whoever comes, one after the other: whom a partition keeps waiting
    waits in the kernel, connected."""

    def __init__(self, host: str, port: int, let_in: Callable[[socket.socket], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._let_in = let_in
        port = self._listening.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._thread = threading.Thread(target=self._accept, name=f"proxy-{port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is let in any more. Waits for nothing: the thread may be held up by a partition."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listening:
            while True:
                try:
                    near, _ = self._listening.accept()
                except OSError:
                    return
                self._let_in(near)


class _Passage:
    """One connection: `near` to whoever dialled, `far` to whom they meant."""

    def __init__(self, near: socket.socket, far: socket.socket, trouble: Trouble, pages: bool) -> None:
        self._near, self._far = near, far
        self._trouble = trouble
        self._pages = pages
        self._lock = threading.Lock()
        self._pumping = 2
        for sock in (near, far):
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        # The answering direction first: a gRPC server speaks first, and a client does not wait long for it.
        for source, sink, spoils in ((self._far, self._near, self._pages), (self._near, self._far, False)):
            threading.Thread(target=self._pump, args=(source, sink, spoils), name="proxy-pump", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, spoils: bool) -> None:
        """Passes bytes on until `source` says no more, or either end is gone; the last pump closes both."""
        try:
            while chunk := source.recv(CHUNK_BYTES):
                self._trouble.hold()
                if delay_s := self._trouble.delay_s(len(chunk)):
                    time.sleep(delay_s)
                if not (spoils and len(chunk) > PAGE_CHUNK_BYTES):
                    sink.sendall(chunk)
                elif not self._send_corrupt(sink, chunk):
                    break
            self._trouble.hold()
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._trouble.hold()
            self._end()
        finally:
            with self._lock:
                self._pumping -= 1
                if not self._pumping:
                    self._near.close()
                    self._far.close()

    def _send_corrupt(self, sink: socket.socket, chunk: bytes) -> bool:
        """Sends bytes of pages, spoilt if that is due; False where they were the last."""
        match self._trouble.take(Kind.CORRUPT, Kind.TRUNCATE, Kind.DUPLICATE):
            case Kind.CORRUPT:
                damaged = bytearray(chunk)
                damaged[len(chunk) // 2] ^= 1
                sink.sendall(damaged)
            case Kind.TRUNCATE:
                sink.sendall(chunk[: len(chunk) // 2])
                self._end()
                return False
            case Kind.DUPLICATE:
                sink.sendall(chunk)
                sink.sendall(chunk)
            case _:
                sink.sendall(chunk)
        return True

    def _end(self) -> None:
        for sock in (self._near, self._far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
