"""The ray engine: clients stick to workers, which are processes on the cores and GPUs of a machine or a cluster.

A client runs in the same worker as long as the workers stay the same, so its model, data and state need not move.
Content for several clients is put into Ray's object store once, and workers read it there without a copy. Replies are
taken one at a time, in client order; workers are never more than a few clients ahead.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field

from polyfed.core.activity import client_started, preparing
from polyfed.core.errors import ConfigError, ExchangeError, PayloadError, PolyfedError
from polyfed.core.extras import how_to_install
from polyfed.engines.engine import EngineSettings, Hosting, PortableSite
from polyfed.engines.quiet import SPEED, be_quiet
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.wire import messages
from polyfed.wire.limits import Frame

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_STARTING = 120.0  # seconds that a new worker may take before its clients' time begins to count
_LOOK = 2.0  # seconds between two checks of the nodes' free resources
_SMALL = 1 << 16  # bytes of a frame that travels with each request; putting it into the store takes longer
_AHEAD = 2  # clients queued at each worker before the reply of the first is taken
Portable = tuple[str, list[np.ndarray[Any, np.dtype[np.uint8]]]]


class Ray(EngineSettings):
    """Steps execute in Ray workers, on this machine or on the nodes of a cluster."""

    pip_extra: ClassVar[str] = "ray"

    workers: int | None = Field(
        default=None,
        ge=1,
        description="processes; None: as many as there are cores on this machine or cluster for run.threads each",
    )
    gpus: float = Field(default=0, ge=0, description="GPUs per worker; 0.5 lets two workers share one")
    address: str | None = Field(
        default=None, description="address of a Ray cluster, or auto; None: start Ray on this machine for the run"
    )
    retries: int = Field(default=2, ge=0, description="times that a step is sent to a new worker when its worker died")

    def require(self) -> None:
        if find_spec("ray") is None:
            raise ConfigError(f"run.engine is ray, which is not installed; {how_to_install(self.pip_extra)}")

    def serve(self, hosting: Hosting, body: Callable[[Engine], _T]) -> _T:
        """Start workers, run ``body``, and stop them."""
        threads, cores = hosting.settings.run.threads, os.cpu_count() or 1
        wanted, options = self.workers, dict[str, Any](address=self.address)
        if self.address is None:
            wanted = self.workers or max(cores // threads, 1)
            options = {"num_cpus": max(wanted * threads, cores)}
        with ray_here(**options), _Pool(hosting, wanted, self) as pool:
            return body(RayEngine(hosting.federation.infos, pool, self.retries))


@contextlib.contextmanager
def ray_here(**options: Any) -> Iterator[None]:
    """Connect to Ray within the block: to a cluster with ``address``, else on this machine; a running one is left."""
    import ray

    address = options.get("address")
    if address is None and ray.is_initialized():
        yield
        return
    try:
        start_ray(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"run.engine.address {address}: cannot connect to Ray ({reason})") from error
    try:
        yield
    finally:
        ray.shutdown()


def start_ray(**options: Any) -> None:
    """Start Ray, or connect to it, without a dashboard and without telemetry."""
    be_quiet()
    # advice on workers without GPUs, which is as intended
    warnings.filterwarnings("ignore", message="Tip: In future versions of Ray", category=FutureWarning)
    import ray

    here = {} if "address" in options else {"address": "local", "include_dashboard": False}
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, **here}
    ray.init(**quiet, runtime_env={"env_vars": _environment()}, **options)


def _environment(**variables: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables, **SPEED}


class Worker:
    """A process that hosts the clients that stick to it."""

    def __init__(self, portable: PortableSite, spec: str) -> None:
        self._portable, self._spec = portable, spec

    def ready(self, mark: str, token: str) -> str:
        """Open the site; returns the reason if this process cannot be used, else an empty text.

        Args:
            mark: File in the run folder that shows whether a node sees the folder of the run's own machine.
            token: Content of that file.
        """
        try:
            if Path(mark).read_text() != token:
                return "it sees another folder there"
            self.site = self._portable.open(RunSpec.model_validate_json(self._spec))
        except (OSError, PolyfedError) as error:
            return " ".join(str(error).split())
        return ""

    def run(self, client: str, text: str, *frames: Portable) -> tuple[str, list[Portable], float, list[float]]:
        """Perform a client's request; returns the answer, the seconds it took, and the losses of its steps."""
        started = time.monotonic()
        try:
            request = messages.request_of(text, [_frame(frame) for frame in frames], self.site.limits)
            answer = self.site.answer(request)
        except PayloadError as error:
            answer = messages.Answer.failed(client, messages.Cause.INVALID, str(error))
        reply, made = messages.envelope_answer(answer)
        losses = [float(loss) for loss in answer.step_losses]
        return reply, [_portable(frame) for frame in made], time.monotonic() - started, losses


def _living() -> list[dict[str, float]]:
    """Resources of each living node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


class _Pool:
    """Workers by number, spread over the living nodes.

    A worker that died is replaced where a node has room, else its clients move to the others; new room is used from the
    next exchange on.

    Args:
        wanted: Number of workers; None: as many as there is room for. Never more than clients.
    """

    def __init__(self, hosting: Hosting, wanted: int | None, settings: Ray) -> None:
        import ray

        self._threads, self._gpus = hosting.settings.run.threads, settings.gpus
        options: dict[str, Any] = {
            "num_cpus": self._threads,
            "num_gpus": self._gpus,
            "scheduling_strategy": "SPREAD",
            # Ray sets the number of threads of its workers by itself, on which floating-point sums depend
            "runtime_env": {"env_vars": _environment(OMP_NUM_THREADS=str(self._threads))},
        }
        self._kind = ray.remote(**options)(Worker)
        self._arguments = hosting.portable, hosting.spec.model_dump_json()
        self._folder, self._token = hosting.folder, secrets.token_hex(8)
        self._mark = hosting.folder / ".seen-by-workers"
        self.limits = hosting.limits
        self.workers: dict[int, Any] = {}
        self._begun: dict[Any, tuple[int, Any]] = {}  # future of a worker's readiness -> its number, and the worker
        self._numbers = itertools.count()
        room = self.room()
        if room < (settings.workers or 1):
            asked = f"run.engine.workers is {settings.workers}, and " if settings.workers else ""
            each = f"run.threads={self._threads}" + (f" and run.engine.gpus={self._gpus:g}" if self._gpus else "")
            raise ConfigError(
                f"{asked}each Ray worker takes {each}; the nodes have room for {room} of them ({self._nodes()})"
            )
        self._most = min(wanted or sys.maxsize, max(len(hosting.federation.infos), 1))

    def __enter__(self) -> _Pool:
        self._mark.write_text(self._token)
        try:
            self._begin(min(self._most, self.room()))
            self._settle()
            if not self.workers:
                raise ExchangeError(f"no Ray worker started within {_STARTING:g} s ({self._nodes()})")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for worker in (*self.workers.values(), *(worker for _, worker in self._begun.values())):
            ray.kill(worker)
        self._mark.unlink(missing_ok=True)

    def room(self) -> int:
        """Number of workers for which the living nodes have CPUs and GPUs, used or free."""
        needs = {"CPU": self._threads} | ({"GPU": self._gpus} if self._gpus else {})
        return sum(
            min(int(node.get(resource, 0) / need + 1e-6) for resource, need in needs.items()) for node in _living()
        )

    def _nodes(self) -> str:
        resources = ("CPU", "GPU") if self._gpus else ("CPU",)
        return "; ".join(
            f"{resource}s by node: " + ", ".join(f"{node.get(resource, 0):g}" for node in _living())
            for resource in resources
        )

    def home(self, position: int) -> int:
        """The number of the worker that client number ``position`` sticks to.

        Raises:
            ExchangeError: no worker is left.
        """
        numbers = sorted(self.workers)
        if not numbers:
            raise ExchangeError("no Ray worker is left, and no node has room for one; bring nodes back and resume")
        return numbers[position % len(numbers)]

    def grow(self) -> None:
        """Use the workers that have become ready; begin more where nodes have joined."""
        missing = self._most - len(self.workers) - len(self._begun)
        if missing > 0:
            self._begin(min(missing, self.room() - len(self.workers) - len(self._begun)))
        if self._begun:
            self._settle(patience=0)

    def replace(self, number: int) -> bool:
        """Start a new process in place of one that died or hangs, if there is room; client states are on disk."""
        import ray

        ray.kill(self.workers.pop(number))
        self._begin(1, number)
        self._settle()  # its start does not count as its clients' time
        return number in self.workers

    def _begin(self, count: int, number: int | None = None) -> None:
        for _ in range(count):
            worker: Any = self._kind.remote(*self._arguments)
            own = next(self._numbers) if number is None else number
            self._begun[worker.ready.remote(str(self._mark), self._token)] = own, worker

    def _settle(self, patience: float = _STARTING) -> None:
        """Take workers as they become ready, and give up those without room on a node or that take too long.

        Raises:
            ConfigError: a worker does not see the run folder.
        """
        import ray

        end, count = time.monotonic() + patience, len(self._begun)
        while self._begun:
            ready, _ = ray.wait(list(self._begun), timeout=min(_LOOK, patience))
            for word in ready:
                self._admit(*self._begun.pop(word), word)
            preparing(f"waiting for Ray workers: {count - len(self._begun)} of {count} are ready")
            if ready:
                continue
            if len(self.workers) + len(self._begun) > self.room() or (patience and time.monotonic() >= end):
                self._give_up(count)
            if not patience:  # the others are checked again later
                return

    def _give_up(self, count: int) -> None:
        import ray

        for _, worker in self._begun.values():
            ray.kill(worker)
        _log.warning("%d of %d Ray workers found no room (%s)", len(self._begun), count, self._nodes())
        self._begun = {}

    def _admit(self, number: int, worker: Any, word: Any) -> None:
        import ray

        try:
            refused = ray.get(word)
        except ray.exceptions.RayError as error:
            _log.warning("a Ray worker did not start: %s", str(error).strip().splitlines()[-1])
            return
        if not refused:
            self.workers[number] = worker
            return
        ray.kill(worker)
        problem = f"a Ray worker cannot use the run folder {self._folder}: {refused}"
        if self.workers:  # on a node that joined later
            _log.warning("%s; it is left out", problem)
            return
        raise ConfigError(f"{problem}; --out, data and weights must be on storage that all nodes see under one path")


@dataclass
class _Pending:
    """A request under way."""

    request: messages.Request
    envelope: messages.Envelope
    position: int
    worker: int
    reply: Any = None
    deaths: int = 0


class RayEngine:
    """Executes steps in the workers of a pool; see ``Engine``."""

    def __init__(self, infos: tuple[ClientInfo, ...], pool: _Pool, retries: int) -> None:
        self._infos, self._pool, self._retries = infos, pool, retries
        # clients stick to a worker while the pool stays the same, so that their data and states are opened once
        self._position = {info.id: position for position, info in enumerate(infos)}

    def clients(self) -> tuple[ClientInfo, ...]:
        return self._infos

    def exchange(self, requests: Sequence[messages.Request], deadline: float | None) -> Iterator[messages.Answer]:
        """Run the step in the clients' workers; see ``Engine.exchange``. Time in a worker's queue does not count."""
        self._pool.grow()
        envelopes, frames = messages.envelope_requests(requests)
        uses = Counter(place for envelope in envelopes for place in envelope.places)
        round_trip = _RoundTrip(self._pool, frames, uses, deadline, self._retries)
        for request, envelope in zip(requests, envelopes, strict=True):
            if round_trip.is_full():
                yield round_trip.next()
            position = self._position[request.client]
            round_trip.submit(_Pending(request, envelope, position, self._pool.home(position)))
        while round_trip.under_way:
            yield round_trip.next()


@dataclass
class _RoundTrip:
    """One exchange: requests under way in the order of submission, and the frames that they share."""

    pool: _Pool
    frames: list[Frame]
    uses: Counter[int]
    deadline: float | None
    retries: int
    under_way: deque[_Pending] = field(default_factory=deque)
    _placed: dict[int, Any] = field(default_factory=dict)
    _free_since: dict[int, float] = field(default_factory=dict)

    def is_full(self) -> bool:
        return len(self.under_way) >= _AHEAD * len(self.pool.workers)

    def submit(self, pending: _Pending) -> None:
        self._free_since.setdefault(pending.worker, time.monotonic())
        if all(other.worker != pending.worker for other in self.under_way):
            client_started(pending.request.client, pending.request.step)
        self.under_way.append(pending)
        self._send(pending)

    def next(self) -> messages.Answer:
        pending = self.under_way[0]
        answer = None
        while answer is None:
            answer = self._wait(pending)
        self.under_way.popleft()
        following = next((other for other in self.under_way if other.worker == pending.worker), None)
        if following is not None:  # now at the head of the worker's queue
            client_started(following.request.client, following.request.step)
        self._free_since[pending.worker] = time.monotonic()
        self.uses.subtract(pending.envelope.places)
        for place in pending.envelope.places:
            if not self.uses[place]:
                self._placed.pop(place, None)
        return answer

    def _wait(self, pending: _Pending) -> messages.Answer | None:
        """The answer, or None if the request was given to another worker."""
        from ray import exceptions, get

        client, patience = pending.request.client, None
        if self.deadline is not None:
            patience = max(self._free_since[pending.worker] + self.deadline - time.monotonic(), 0.0)
        try:
            text, frames, seconds, losses = get(pending.reply, timeout=patience)
        except exceptions.GetTimeoutError:
            self._restart(pending.worker, skip=pending)  # it hangs, or others would wait for it
            return messages.Answer.late(client, self.deadline)
        except exceptions.RayActorError as error:
            return self._died(pending, str(error))
        except exceptions.RayError as error:
            # an exception of the worker, or a reply that Ray lost
            cause = messages.Cause.FAILED if isinstance(error, exceptions.RayTaskError) else messages.Cause.LOST
            return messages.Answer.failed(client, cause, f"{type(error).__name__} in its worker", str(error))
        if self.deadline is not None and seconds > self.deadline:
            return messages.Answer.late(client, self.deadline)
        answer = messages.answer_of(pending.request, text, [_frame(frame) for frame in frames], self.pool.limits)
        return replace(answer, step_losses=losses)

    def _died(self, pending: _Pending, details: str) -> messages.Answer | None:
        pending.deaths += 1
        _log.warning("the worker of client %s died", pending.request.client)
        if pending.deaths <= self.retries:
            self._restart(pending.worker)
            return None
        self._restart(pending.worker, skip=pending)
        reason = f"its worker died {pending.deaths} times in this step (run.engine.retries is {self.retries})"
        return messages.Answer.failed(pending.request.client, messages.Cause.LOST, reason, details)

    def _restart(self, number: int, skip: _Pending | None = None) -> None:
        """Send the requests of a worker to a new one in its place, or to the remaining ones."""
        waiting = [pending for pending in self.under_way if pending.worker == number and pending is not skip]
        if not self.pool.replace(number):
            left = len(self.pool.workers)
            _log.warning("no node has room for a new Ray worker: its clients move to the %d that are left", left)
            for pending in waiting:
                pending.worker = self.pool.home(pending.position)
        self._free_since[number] = time.monotonic()
        for pending in waiting:
            self._free_since.setdefault(pending.worker, time.monotonic())
            self._send(pending)

    def _send(self, pending: _Pending) -> None:
        frames = [self._place(number) for number in pending.envelope.places]
        worker = self.pool.workers[pending.worker]
        pending.reply = worker.run.remote(pending.request.client, pending.envelope.text, *frames)

    def _place(self, number: int) -> Any:
        import ray

        if number not in self._placed:
            portable = _portable(self.frames[number])
            small = sum(buffer.nbytes for buffer in self.frames[number].buffers) < _SMALL
            self._placed[number] = portable if small else ray.put(portable)
        return self._placed[number]


def _portable(frame: Frame) -> Portable:
    return frame.header, [np.frombuffer(buffer, dtype=np.uint8) for buffer in frame.buffers]


def _frame(portable: Portable) -> Frame:
    header, arrays = portable
    return Frame(header, [array.data for array in arrays])
