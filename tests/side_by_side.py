"""Runs tests in processes which share one collection. A plugin of pytest: `-p tests.side_by_side --processes 3`.

To collect takes a quarter of a minute of the processor and 700 MB, most of it for modules. So one process collects, and
forks those that run the tests: each has all that was loaded. A process takes a whole file at a time, and takes the next
one when it begins the last test of the one before, so that what both files share is not set up twice. What tests report
goes to the process that collected, which prints and writes it. Where a process dies, the test that it ran has failed,
and another process goes on behind it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.junitxml import LogXML
from _pytest.unraisableexception import collect_unraisable, gc_collect_harder

FILE, BEGUN, REPORT = "file", "begun", "report"
"""What a process says: it wants a file, it has begun a test, and what that test reports."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=2, help="processes that run the tests")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.config.option.collectonly or session.testsfailed:
        return None  # what pytest itself does is right
    _SharedRun(session).run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class _SharedRun:
    """What the process that collected does: it hands out files, and tells pytest what is reported."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        files: dict[Path, list[int]] = {}
        for number, item in enumerate(session.items):
            files.setdefault(item.path, []).append(number)
        self._files = deque(files.values())
        """The numbers of their tests, file by file, for those that no process has been handed."""
        self._running: dict[Connection, _TestProcess] = {}
        self._number = 0
        """Processes forked so far."""

    def run(self) -> None:
        _prepare_forks(self._session.config)
        try:
            for _ in range(self._session.config.option.processes):
                self._fork()
            while self._running:
                for connection in wait(list(self._running)):
                    assert isinstance(connection, Connection)
                    self._hear(connection)
        finally:
            for connection, running in self._running.items():
                os.kill(running.pid, signal.SIGKILL)
                connection.close()
                os.waitpid(running.pid, 0)

    def _fork(self) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a lock that another thread holds would stay locked for ever"
        ours, theirs = multiprocessing.Pipe()
        self._number += 1
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self._running):
                connection.close()  # else its other end would not see that this process is all that is left
            _run_tests(self._session, theirs, self._number)
        theirs.close()
        self._running[ours] = _TestProcess(pid)

    def _hear(self, connection: Connection) -> None:
        running = self._running[connection]
        try:
            said, value = connection.recv()
        except (EOFError, ConnectionResetError):
            self._end(connection)
            return
        if said == FILE:
            if self._session.shouldfail or self._session.shouldstop:
                self._files.clear()
            numbers = self._files.popleft() if self._files else []
            running.tests.extend(numbers)
            connection.send(numbers)
        elif said == BEGUN:
            running.begun = running.tests.popleft()
        else:
            hook = self._session.config.hook
            report = hook.pytest_report_from_serializable(config=self._session.config, data=value)
            hook.pytest_runtest_logreport(report=report)

    def _end(self, connection: Connection) -> None:
        """Accounts for what a process has left undone. One that has ended well has left nothing."""
        running = self._running.pop(connection)
        connection.close()
        _, status = os.waitpid(running.pid, 0)
        if status == 0:
            return
        item = self._session.items[running.tests[0] if running.begun is None else running.begun]
        text = f"the process that ran this test has ended: {os.waitstatus_to_exitcode(status)}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "teardown", start=0, stop=0)
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if running.tests:
            self._files.appendleft(list(running.tests))
        if self._files:
            self._fork()


class _TestProcess:
    """A process that runs tests, as the one that collected knows it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.tests: deque[int] = deque()
        """Those which it was handed and has not begun."""
        self.begun: int | None = None


def _prepare_forks(config: pytest.Config) -> None:
    """Files that several processes would share, as they share where in them is read."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()


def _run_tests(session: pytest.Session, connection: Connection, number: int) -> NoReturn:
    """What a forked process does."""
    status = 1
    try:
        _begin_process(session, connection, number)
        items = _items(session, connection)
        item = next(items, None)
        while item is not None:
            connection.send((BEGUN, None))
            following = next(items, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        session._setupstate.teardown_exact(None)
        gc_collect_harder(1)
        collect_unraisable(session.config)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _begin_process(session: pytest.Session, connection: Connection, number: int) -> None:
    config = session.config
    plugins = config.pluginmanager
    plugins.getplugin("capturemanager").start_global_capturing()
    plugins.getplugin("capturemanager").suspend_global_capture(in_=True)
    config._tmp_path_factory._basetemp /= f"process-{number}"  # type: ignore[attr-defined]
    config._tmp_path_factory._basetemp.mkdir(mode=0o700)  # type: ignore[attr-defined]
    for plugin in [each for each in plugins.get_plugins() if isinstance(each, LogXML)]:
        plugins.unregister(plugin)
    plugins.unregister(name="lfplugin")
    terminal = plugins.unregister(name="terminalreporter")
    plugins.register(_QuietTerminal(terminal), "terminalreporter")
    plugins.register(_Reporter(config, connection))


def _items(session: pytest.Session, connection: Connection) -> Iterator[pytest.Item]:
    while True:
        connection.send((FILE, None))
        numbers = connection.recv()
        if not numbers:
            return
        for number in numbers:
            yield session.items[number]


class _QuietTerminal:
    """A place where pytest-timeout prints the stacks of a test that has taken too long."""

    def __init__(self, terminal: Any) -> None:
        self._tw = terminal._tw


class _Reporter:
    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send((REPORT, data))
