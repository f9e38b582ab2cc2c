"""Tests in forked workers: ``pytest --workers 2``.

One process imports and collects, then forks; each worker is handed tests by their index, one ahead of the running one,
as the next test decides which fixtures end. A worker takes module after module, then half of what another has left.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import warnings
from collections import defaultdict, deque
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # the reports of a test, not yet handed to the plugins that count and print


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="processes that run the tests; forked after collection")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if option.workers < 2 or session.testsfailed or option.collectonly or option.usepdb or not hasattr(os, "fork"):
        return None
    session.config._tmp_path_factory.getbasetemp()  # one for all workers
    run = _Run(session)
    try:
        run.to_the_end(min(option.workers, len(session.items)))
    finally:
        run.end_workers()
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    usages = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    terminalreporter.write_line(f"CPU seconds: {sum(one.ru_utime + one.ru_stime for one in usages):.0f}")


class _Run:
    """The parent: hands out tests and reports what comes back."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.hook = session, session.config.hook
        modules: dict[str, deque[int]] = defaultdict(deque)
        for index, item in enumerate(session.items):
            modules[item.location[0]].append(index)
        self.modules = deque(modules.values())
        self.workers: dict[Connection, multiprocessing.process.BaseProcess] = {}
        self.own: dict[Connection, deque[int]] = {}  # of the module at hand, not yet handed out
        self.handed: dict[Connection, deque[int]] = {}  # the running test and the next one

    def to_the_end(self, workers: int) -> None:
        for _ in range(workers):
            self.fork(deque())
        while self.workers:
            for worker in wait(list(self.workers)):
                reports, caught = None, []
                with suppress(EOFError, OSError):
                    reports, caught = worker.recv()
                for nodeid, category, *parts in caught:
                    warning = warnings.WarningMessage(parts[0], type(category, (Warning,), {}), *parts[1:])
                    known = {"warning_message": warning, "when": "runtest", "nodeid": nodeid, "location": None}
                    self.hook.pytest_warning_recorded.call_historic(kwargs=known)
                if reports is None:
                    self.bury(worker)
                else:
                    self.hand(worker)
                    restored = self.hook.pytest_report_from_serializable
                    self.report(worker, [restored(config=self.session.config, data=report) for report in reports])

    def fork(self, own: deque[int]) -> None:
        ours, theirs = multiprocessing.Pipe()
        arguments = self.session, theirs, [*self.workers, ours]
        process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        self.workers[ours], self.own[ours], self.handed[ours] = process, own, deque()
        self.hand(ours)
        self.hand(ours)

    def hand(self, worker: Connection) -> None:
        """Sends the index of the next test, or None as nothing is left."""
        own = self.own[worker]
        if not own and self.modules:
            own.extend(self.modules.popleft())
        elif not own:
            longest = max(self.own.values(), key=len)
            own.extendleft(longest.pop() for _ in range((len(longest) + 1) // 2))
        self.handed[worker].extend(own and [own[0]])
        with suppress(OSError):  # it has ended: its last reports, or the lack of them, come next
            worker.send(own.popleft() if own else None)

    def report(self, worker: Connection, reports: list[pytest.TestReport]) -> None:
        item, hook = self.session.items[self.handed[worker].popleft()], self.hook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def bury(self, worker: Connection) -> None:
        """Reports a worker that died as a failure of its test; another takes over what it had left."""
        process, own = self.workers.pop(worker), self.own.pop(worker)
        process.join()
        if self.handed[worker]:
            item = self.session.items[self.handed[worker][0]]
            text = f"the worker of this test died: exit status {process.exitcode}"
            self.report(worker, [pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")])
            self.fork(self.handed[worker] + own)

    def end_workers(self) -> None:
        """Waits for workers that are left as the run was broken off, whose pipes then end, and for their fixtures."""
        for worker in self.workers:
            worker.close()
        for patience, end in ((1.0, signal.SIGINT), (10.0, signal.SIGKILL)):
            for process in self.workers.values():
                process.join(patience)
                if process.is_alive():
                    os.kill(process.pid or 0, end)


class _Worker:
    """A plugin of the worker: keeps reports from the plugins of the parent, sends them and warnings over the pipe."""

    def __init__(self, parent: Connection) -> None:
        self.parent, self.reports, self.caught = parent, list[Any](), list[Any]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        self.reports = runtestprotocol(item, log=False, nextitem=nextitem)
        return True

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        it = warning_message
        self.caught.append((nodeid, it.category.__name__, str(it.message), it.filename, it.lineno))

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self.caught = []  # a new plugin is shown those of the parent too
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        serialised = item.config.hook.pytest_report_to_serializable
        reports = [serialised(config=item.config, report=report) for report in self.reports]
        self.parent.send((reports, self.caught))


def _work(session: pytest.Session, parent: Connection, inherited: list[Connection]) -> None:
    for end in inherited:  # so that the end of the parent ends this process
        end.close()
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # with files of its own
    capture.suspend_global_capture()
    worker = _Worker(parent)
    session.config.pluginmanager.register(worker)
    try:
        index, following = parent.recv(), parent.recv()
        while index is not None:
            worker.run(session.items[index], None if following is None else session.items[following])
            index, following = following, following if following is None else parent.recv()
    except (EOFError, OSError, KeyboardInterrupt):  # the parent has ended the run, or the user
        pass
    finally:
        session._setupstate.teardown_exact(None)
        atexit._run_exitfuncs()  # multiprocessing leaves them out, and with them processes that tests started
