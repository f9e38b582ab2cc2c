"""The ray engine: workers are processes on the cores and GPUs of a machine or a cluster.

An idle worker takes the next clients, any of them: all have the data open, and states lie in the run folder. Small
clients share a call. Content for several clients is put into Ray's object store once, and workers read it there without
a copy. Replies are consumed one at a time, in client order; bytes of those that come early are bounded.
"""

from __future__ import annotations

import contextlib
import logging
import math
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

from polyfed.core.activity import ClientStarted, preparing, report
from polyfed.core.errors import ConfigError, ExchangeError, PayloadError, PolyfedError
from polyfed.core.extras import how_to_install
from polyfed.engines.engine import EngineSettings, Hosting, PortableSite
from polyfed.engines.quiet import SPEED, be_quiet
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.wire import messages
from polyfed.wire.limits import Frame
from polyfed.wire.messages import Request

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_STARTING = 120.0  # seconds that a new worker may take before its clients' time begins to count
_LOOK = 2.0  # seconds between two checks of the nodes' free resources
_TICK = 0.1  # seconds between two checks of deadlines
_SMALL = 1 << 16  # bytes of a frame that travels with each request; putting it into the store takes longer
_SHORT, _LONG = 0.01, 0.2  # seconds: calls below the first do not shrink, and none that clients share is longer
_SHARED = 1 << 22  # bytes of replies that share a call, which costs as much as to move some of them
_HELD = 1 << 26  # bytes of replies that are under way or early, of more than two a worker
Portable = tuple[str, list[np.ndarray[Any, np.dtype[np.uint8]]]]
_Done = tuple[str, list[Portable], float, list[float]]
"""Answer, its frames, the seconds it took, and the losses of its steps."""


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
            return body(RayEngine(hosting.federation.infos, pool))


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
    """A process that performs steps of all clients."""

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

    def run(self, asked: Sequence[tuple[str, messages.Envelope]], numbers: list[int], *frames: Portable) -> list[_Done]:
        """Perform requests of clients one after the other, with the frames of the exchange that have these numbers."""
        done, at = list[_Done](), dict(zip(numbers, frames, strict=True))
        for client, envelope in asked:
            started = time.monotonic()
            try:
                own = [_frame(at[place]) for place in envelope.places]
                request = messages.request_of(envelope.text, own, self.site.limits)
                answer = self.site.answer(request)
            except PayloadError as error:
                answer = messages.Answer.failed(client, messages.Cause.INVALID, str(error))
            reply, made = messages.envelope_answer(answer)
            # a copy where the memory of this reply may serve the next one's
            sent = [_portable(frame, copied=len(asked) > 1) for frame in made]
            losses = [float(loss) for loss in answer.step_losses]
            done.append((reply, sent, time.monotonic() - started, losses))
        return done


class _Pool:
    """Workers, spread over the living nodes.

    A worker that died is replaced where a node has room, else its clients move to the others; new room is used from the
    next exchange on.

    Args:
        wanted: Number of workers; None: as many as there is room for. Never more than clients.
    """

    def __init__(self, hosting: Hosting, wanted: int | None, settings: Ray) -> None:
        import ray

        self.ray: Any = ray
        self._threads, self._gpus = hosting.settings.run.threads, settings.gpus
        self._needs = {"CPU": self._threads} | ({"GPU": self._gpus} if self._gpus else {})
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
        self.limits, self.retries = hosting.limits, settings.retries
        self.workers: list[Any] = []
        self._begun: dict[Any, Any] = {}  # future of a worker's readiness -> the worker
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
        for worker in (*self.workers, *self._begun.values()):
            self.ray.kill(worker)
        self._mark.unlink(missing_ok=True)

    def room(self) -> int:
        """Number of workers for which the living nodes have CPUs and GPUs, used or free."""
        needs = self._needs.items()
        return sum(min(int(node.get(name, 0) / need + 1e-6) for name, need in needs) for node in self._living())

    def _living(self) -> list[dict[str, float]]:
        """Resources of each living node of the cluster."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _nodes(self) -> str:
        return "; ".join(
            f"{name}s by node: " + ", ".join(f"{node.get(name, 0):g}" for node in self._living())
            for name in self._needs
        )

    def grow(self) -> None:
        """Use the workers that have become ready; begin more where nodes have joined."""
        missing = self._most - len(self.workers) - len(self._begun)
        if missing > 0:
            self._begin(min(missing, self.room() - len(self.workers) - len(self._begun)))
        if self._begun:
            self._settle(patience=0)

    def replace(self, worker: Any) -> None:
        """Start a new process in place of one that died or hangs, if there is room; client states are on disk."""
        self.workers.remove(worker)
        self.ray.kill(worker)
        left = len(self.workers)
        self._begin(1)
        self._settle()  # its start does not count as its clients' time
        if len(self.workers) <= left:
            _log.warning("no node has room for a new Ray worker: its clients move to the %d that are left", left)

    def _begin(self, count: int) -> None:
        for _ in range(count):
            worker: Any = self._kind.remote(*self._arguments)
            self._begun[worker.ready.remote(str(self._mark), self._token)] = worker

    def _settle(self, patience: float = _STARTING) -> None:
        """Take workers as they become ready, and give up those without room on a node or that take too long.

        Raises:
            ConfigError: a worker does not see the run folder.
        """
        end, count = time.monotonic() + patience, len(self._begun)
        while self._begun:
            ready, _ = self.ray.wait(list(self._begun), timeout=min(_LOOK, patience))
            for word in ready:
                self._admit(self._begun.pop(word), word)
            preparing(f"waiting for Ray workers: {count - len(self._begun)} of {count} are ready")
            late = patience and time.monotonic() >= end
            if not ready and (late or len(self.workers) + len(self._begun) > self.room()):
                _log.warning("%d of %d Ray workers found no room (%s)", len(self._begun), count, self._nodes())
                while self._begun:
                    self.ray.kill(self._begun.popitem()[1])
            if not (ready or patience):  # the others are checked again later
                return

    def _admit(self, worker: Any, word: Any) -> None:
        try:
            refused = self.ray.get(word)
        except self.ray.exceptions.RayError as error:
            _log.warning("a Ray worker did not start: %s", str(error).strip().splitlines()[-1])
            return
        if not refused:
            self.workers.append(worker)
            return
        self.ray.kill(worker)
        problem = f"a Ray worker cannot use the run folder {self._folder}: {refused}"
        if not self.workers:
            raise ConfigError(
                f"{problem}; --out, data and weights must be on storage that all nodes see under one path"
            )
        _log.warning("%s; it is left out", problem)  # on a node that joined later


@dataclass
class Schedule:
    """Requests of an exchange, by number, for workers that are idle.

    The fewer are left, the fewer share a call, so that all workers end together. Those whose answers are not consumed
    are at most two a worker, or as many as have replies of ``_HELD`` bytes together.

    Attributes:
        sorts: Step and architecture of each request.
        paces: Seconds and bytes of the latest replies of a sort.
        alone: Requests that share no call.
        waiting: Requests that no worker has taken, in order.
        ahead: Request that a worker has taken, whose answer is not consumed -> bytes of its reply, infinite if unknown.
        first: Request whose answer is consumed next.
    """

    sorts: Sequence[tuple[str, str]]
    paces: dict[tuple[str, str], tuple[float, float]]
    alone: set[int]
    waiting: deque[int]
    ahead: dict[int, float] = field(default_factory=dict)
    first: int = 0

    def take(self, workers: int) -> list[int]:
        """Requests of the next call to one of the workers; none if those that are left have to wait."""
        batch, share, room = list[int](), -(-len(self.waiting) // workers), _HELD - sum(self.ahead.values())
        while self.waiting:
            number, count = self.waiting[0], len(batch) + 1
            seconds, nbytes = self.paces.get(self.sorts[number], (math.inf, math.inf))
            if count == 1:
                joins = nbytes <= room or number == self.first or len(self.ahead) < 2 * workers
            else:
                small = nbytes <= room and count * nbytes <= _SHARED and count * seconds <= _LONG
                few = count <= (share if count * seconds <= _SHORT else share // 2)
                joins = small and few and self.alone.isdisjoint((number, batch[0]))
            if not joins:
                break
            batch.append(self.waiting.popleft())
            self.ahead[number] = nbytes
            room -= nbytes
        return batch

    def is_short(self, batch: Sequence[int]) -> bool:
        """True if a call is known to be done soon."""
        seconds = sum(self.paces.get(self.sorts[number], (math.inf, 0))[0] for number in batch)
        return seconds <= _LONG and self.alone.isdisjoint(batch)

    def learn(self, number: int, reply: _Done) -> None:
        """Note the size of a reply, and how long it took."""
        _, frames, seconds, _ = reply
        self.ahead[number] = nbytes = sum(array.nbytes for _, arrays in frames for array in arrays)
        before, _ = self.paces.get(self.sorts[number], (seconds, nbytes))
        self.paces[self.sorts[number]] = (before + seconds) / 2, nbytes

    def again(self, batch: Sequence[int]) -> None:
        """Put the requests of a call that failed back, each for a call of its own."""
        self.alone |= {*batch}
        self.waiting.extendleft(reversed(batch))
        for number in batch:
            del self.ahead[number]


class RayEngine:
    """Executes steps in the workers of a pool; see ``Engine``."""

    def __init__(self, infos: tuple[ClientInfo, ...], pool: _Pool) -> None:
        self._infos, self._pool = infos, pool
        self._architectures = {info.id: info.architecture for info in infos}
        self._paces: dict[tuple[str, str], tuple[float, float]] = {}

    def clients(self) -> tuple[ClientInfo, ...]:
        return self._infos

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[messages.Answer]:
        """Run the step in the workers, as they are idle; see ``Engine.exchange``. Time in a queue does not count."""
        self._pool.grow()
        sorts, numbers = [(one.step, self._architectures[one.client]) for one in requests], range(len(requests))
        # one that hangs or kills its worker takes no other along
        alone = set(numbers) if deadline is not None or not self._pool.retries else set[int]()
        round_trip = _RoundTrip(self._pool, Schedule(sorts, self._paces, alone, deque(numbers)), requests, deadline)
        for _ in numbers:
            yield round_trip.next()


class _RoundTrip:
    """One exchange: calls under way, answers to be consumed, and the frames that requests share."""

    def __init__(self, pool: _Pool, schedule: Schedule, requests: Sequence[Request], deadline: float | None) -> None:
        self.pool, self.schedule, self.requests, self.deadline = pool, schedule, requests, deadline
        self.envelopes, self.frames = messages.envelope_requests(requests)
        self.uses = Counter(place for envelope in self.envelopes for place in envelope.places)
        self.calls: dict[Any, tuple[Any, list[int], float]] = {}  # future -> worker, requests, begin
        self.answers: dict[int, messages.Answer | _Done] = {}
        self.deaths = Counter[int]()
        self.placed: dict[int, Any] = {}

    def next(self) -> messages.Answer:
        """The next answer in the order of the requests; workers are busy while the caller is."""
        number = self.schedule.first
        self._proceed(0)
        while number not in self.answers:
            self._proceed(_TICK)
        answer = self.answers.pop(number)
        del self.schedule.ahead[number]
        self.schedule.first += 1
        if isinstance(answer, messages.Answer):
            return answer
        text, frames, seconds, losses = answer
        if self.deadline is not None and seconds > self.deadline:
            return messages.Answer.late(self.requests[number].client, self.deadline)
        opened = messages.answer_of(self.requests[number], text, [_frame(frame) for frame in frames], self.pool.limits)
        return replace(opened, step_losses=losses)

    def _proceed(self, patience: float) -> None:
        """Take replies, the first that comes within ``patience`` seconds, or all; give idle workers more to do."""
        self._feed()
        count = 1 if patience else max(len(self.calls), 1)
        ready, pending = self.pool.ray.wait(list(self.calls), num_returns=count, timeout=patience)
        now = time.monotonic()  # what follows may start workers, which takes long
        for future in ready:
            self._take(future, *self.calls.pop(future))
        for future in pending:
            worker, (late, *_), began = self.calls[future]
            if self.deadline is not None and now - began > self.deadline:
                del self.calls[future]
                self.answers[late] = messages.Answer.late(self.requests[late].client, self.deadline)
                self.pool.replace(worker)  # it hangs, or others would wait for it
        self._feed()

    def _feed(self) -> None:
        if not self.pool.workers:
            raise ExchangeError("no Ray worker is left, and no node has room for one; bring nodes back and resume")
        # a second call waits at a worker whose first is short
        busy = [worker for worker, batch, _ in self.calls.values() for _ in range(2 - self.schedule.is_short(batch))]
        for worker in [worker for worker in self.pool.workers if busy.count(worker) < 2]:
            if batch := self.schedule.take(len(self.pool.workers)):
                for number in batch:
                    report(ClientStarted(self.requests[number].client, self.requests[number].step))
                asked = [(self.requests[number].client, self.envelopes[number]) for number in batch]
                frames = sorted({place for _, envelope in asked for place in envelope.places})
                future = worker.run.remote(asked, frames, *map(self._place, frames))
                self.calls[future] = worker, batch, time.monotonic()

    def _take(self, future: Any, worker: Any, batch: list[int], _: float) -> None:
        """Note the answers of a call; one that failed is done again, request by request, as often as it may be."""
        exceptions = self.pool.ray.exceptions
        try:
            for number, reply in zip(batch, self.pool.ray.get(future), strict=True):
                self.schedule.learn(number, reply)
                self.answers[number] = reply
        except exceptions.RayError as error:
            died, (number, *others) = isinstance(error, exceptions.RayActorError), batch
            self.deaths[number] += died and not others
            if others or (died and self.deaths[number] <= self.pool.retries):
                self.schedule.again(batch)
            else:  # an exception of the worker, or a reply that Ray lost
                cause = messages.Cause.FAILED if isinstance(error, exceptions.RayTaskError) else messages.Cause.LOST
                reason = f"{type(error).__name__} in its worker"
                if died:
                    times = f"{self.deaths[number]} times in this step (run.engine.retries is {self.pool.retries})"
                    reason = f"its worker died {times}"
                client = self.requests[number].client
                self.answers[number] = messages.Answer.failed(client, cause, reason, str(error))
            if died and worker in self.pool.workers:
                _log.warning("the worker of client %s died", ", ".join(self.requests[one].client for one in batch))
                self.pool.replace(worker)

    def _place(self, number: int) -> Any:
        """A frame as a worker gets it: one that several clients receive is put into the store once."""
        if number in self.placed:
            return self.placed[number]
        portable, small = _portable(self.frames[number]), sum(b.nbytes for b in self.frames[number].buffers) < _SMALL
        if small or self.uses[number] == 1:
            return portable
        return self.placed.setdefault(number, self.pool.ray.put(portable))


def _portable(frame: Frame, *, copied: bool = False) -> Portable:
    return frame.header, [np.array(np.frombuffer(buffer, dtype=np.uint8), copy=copied) for buffer in frame.buffers]


def _frame(portable: Portable) -> Frame:
    return Frame(portable[0], [array.data for array in portable[1]])
