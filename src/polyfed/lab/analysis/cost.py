"""Cost of a round for a client of each kind: operations, parameters, memory, time and bytes; dry runs.

A dry run checks and builds everything, trains one batch of each kind of participant, and estimates bytes.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.activity import preparing
from polyfed.core.device import cpu_threads, finish_queued, resolve_device
from polyfed.core.errors import ExchangeError
from polyfed.core.randomness import generator, isolated
from polyfed.core.settings import Settings
from polyfed.data.samples import Samples
from polyfed.data.source import Accounts
from polyfed.engines.local import InProcess, LocalEngine
from polyfed.engines.site import Site
from polyfed.federation.client import Client, ClientInfo, ServerEncoders
from polyfed.federation.paces import Sync
from polyfed.federation.participant import Participant
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult
from polyfed.models.model import Model
from polyfed.reporting.run_tables import account_table
from polyfed.reporting.tables import MIB, Cell, TextTable, count, mib, span_of
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER
from polyfed.runs.server_side import accounts_of
from polyfed.runs.session import Session
from polyfed.runs.settings import OutputSettings
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Cause, Request
from polyfed.wire.payload import Logits, Representations

_TRIED = 3  # rounds, as clients of some methods begin alone
_ENOUGH = 16  # samples of a batch on a CPU; a GPU's memory must hold all
_DRAWN = 200  # rounds whose cohorts are drawn at most; a mean over more would be the same
_LENGTHS = ("epochs", "steps", "batches_per_epoch")  # ends of names of training lengths
_ROWS = (Representations.label, Logits.label)  # bundles with a row for each public sample

_S = TypeVar("_S", bound=Settings)
Moved = Mapping[str, Mapping[str, float]]
"""Direction -> kind of bundle -> bytes of one client in a round."""


class Cost(Analysis):
    """Measure the first round of one client of each kind: operations, parameters, memory, seconds and bytes."""

    def answer(self, run: Run) -> AnalysisResult:
        return self.answer_experiment(run.experiment)

    def answer_experiment(self, experiment: Experiment) -> AnalysisResult:
        return round_costs(experiment).result()


def without_deadlines(experiment: Experiment) -> Experiment:
    """The experiment without deadlines and without rules that compare clients, so that one of each kind suffices.

    Masked sums are off too: their bytes equal those of plain replies.
    """
    free: dict[str, Any] = {"min_clients": 1, "deadline": None, "phases": {}, "on_error": "stop"}
    exchange = experiment.run.exchange.model_copy(update=free)
    alone = {"engine": InProcess(), "output": OutputSettings(), "pace": Sync(), "exchange": exchange}
    together = {"clip": None, "secure": None, "robust": None}
    run, aggregation = experiment.run.model_copy(update=alone), experiment.aggregation.model_copy(update=together)
    return experiment.model_copy(update={"run": run, "aggregation": aggregation})


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters of a model, and of those that are trained."""

    parameters: int
    trained: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelSize:
        """Size of a model, without the frozen backbone of a view."""
        sizes = [(value.numel(), value.requires_grad) for value in model.parameters()]
        return cls(sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained))


@dataclass(frozen=True)
class ParticipantCost:
    """Cost of one participant in one round.

    Attributes:
        participant: A client, or the server.
        kind: Group of the client, or ``server``.
        samples: Private training samples; 0 for the server.
        size: Size of its model; None without a model.
        flops: Operations of matrix products, convolutions and attention, forward and backward, as torch counts them:
            a multiplication and an addition are two.
        seconds: Time of its work.
        memory: Bytes at the peak: allocated on a GPU, else resident in the process, data and libraries included;
            None for the server, or where the system does not report it.
        bytes: Direction -> kind of bundle -> bytes.
    """

    participant: str
    kind: str
    samples: int
    size: ModelSize | None
    flops: int
    seconds: float
    memory: int | None
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)

    def moved(self, direction: str) -> int:
        return sum(self.bytes.get(direction, {}).values())


@dataclass(frozen=True)
class RoundCosts:
    """Costs of one round of an experiment.

    Attributes:
        experiment: Name of the experiment.
        method: Name of the algorithm.
        round: Number of the round.
        device: Device of the models.
        costs: One client of each kind, then the server, for these clients alone.
    """

    experiment: str
    method: str
    round: int
    device: str
    costs: tuple[ParticipantCost, ...]

    def result(self) -> AnalysisResult:
        """Work of each participant in the round, and size of its model."""
        work: list[dict[str, Cell]] = [
            {
                "": cost.participant,
                "samples": cost.samples,
                "GFLOP": cost.flops / 1e9,
                "seconds": cost.seconds,
                "peak MiB": None if cost.memory is None else cost.memory / MIB,
                "MiB down": None if cost.kind == SERVER else cost.moved("down") / MIB,
                "MiB up": None if cost.kind == SERVER else cost.moved("up") / MIB,
            }
            for cost in self.costs
        ]
        sizes = [{"": cost.participant, **asdict(cost.size)} for cost in self.costs if cost.size is not None]
        notes = [
            "GFLOP: matrix products, convolutions and attention, forward and backward; a multiplication and an "
            "addition are two.",
            "The server's work is that of a round with these clients alone.",
        ]
        title = f"Round {self.round} of {self.experiment} ({self.method}) on {self.device}, one client of each kind"
        return AnalysisResult(asdict(self), [TextTable.of(title, work, notes), TextTable.of("Models", sizes)])


@dataclass
class _Meter:
    """Meter of work by participant: operations with ``counting``, otherwise time and memory."""

    counting: bool
    device: torch.device
    flops: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, participant: str) -> Iterator[None]:
        counter = FlopCounterMode(display=False) if self.counting else None
        peak = PeakMemory(self.device)
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if counter is not None:
                # cuDNN's recurrent kernels are not counted; without cuDNN they are matrix products, which are
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
                stack.enter_context(counter)
            yield
        finish_queued(self.device)
        self.seconds[participant] = self.seconds.get(participant, 0.0) + time.perf_counter() - started
        peaks = self.memory.get(participant), peak.read()
        self.memory[participant] = max((most for most in peaks if most is not None), default=None)
        if counter is not None:
            self.flops[participant] = self.flops.get(participant, 0) + counter.get_total_flops()


class StrictEngine(LocalEngine):
    """An engine without deadlines, on which a client's failure is an error.

    Args:
        site: Site of the clients.
        around: Client -> context of each of its steps, such as a meter.
    """

    def __init__(self, site: Site, around: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        super().__init__(site)
        self.around = around

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for request in requests:
            with self.around(request.client):
                (answer,) = super().exchange([request], None)
            if answer.failure is not None and answer.failure.cause is Cause.REFUSED:
                raise ExchangeError(f"client '{request.client}' failed in '{request.step}': {answer.failure.text}")
            yield answer


def round_costs(experiment: Experiment) -> RoundCosts:
    """Measure the first round with clients, one of each kind, in a temporary folder.

    The round is run twice, as counting operations takes time and memory of its own.

    Args:
        experiment: Its settings; the engine is replaced by this process.

    Raises:
        PolyfedError: Settings are inconsistent, or a client fails.
    """
    experiment = without_deadlines(experiment)
    run, number = experiment.run, min(experiment.algorithm.rounds_without_clients + 1, experiment.run.rounds)
    device = resolve_device(run.device)
    with cpu_threads(run.threads):
        # first, so that decoded data are in the cache when time is measured
        counted, work = _Meter(True, device), _Meter(False, device)
        _measured(experiment, number, counted)
        session, ledger = _measured(experiment, number, work)
        clients, sizes = one_of_each(session.server.clients), model_sizes(session)
    costs = []
    for client in clients:
        size, moved = sizes[client.id], bytes_by_kind(ledger, client.id)
        spent = counted.flops.get(client.id, 0), work.seconds.get(client.id, 0.0), work.memory.get(client.id)
        costs.append(ParticipantCost(client.id, client.group, client.samples, size, *spent, moved))
    measured = sum(cost.seconds for cost in costs)
    own = counted.flops.get(SERVER, 0) - sum(cost.flops for cost in costs), work.seconds[SERVER] - measured
    server = ParticipantCost(SERVER, SERVER, 0, sizes.get(SERVER), *own, None)
    return RoundCosts(experiment.name, experiment.algorithm.component_name(), number, str(device), (*costs, server))


def _measured(experiment: Experiment, number: int, meter: _Meter) -> tuple[Session, Ledger]:
    """A session after a round that was measured, and the round's ledger."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(experiment, RunFolder(Path(folder)), "cost")
        session.require_sound()
        engine = StrictEngine(session.hosting.here())
        session.attach(engine)
        session.setup()
        for earlier in range(1, number):
            one_round(session, earlier, nullcontext())
        engine.around = meter.of
        return session, one_round(session, number, meter.of(SERVER))


def model_sizes(session: Session) -> dict[str, ModelSize]:
    """Model sizes of one client of each kind, and of the server if it has a model."""
    population = session.federation
    sizes = {
        client.id: ModelSize.of(population.client_model(population.members[client.id]))
        for client in one_of_each(session.server.clients)
    }
    return sizes | ({SERVER: ModelSize.of(session.server.model)} if session.server.has_model else {})


def one_round(session: Session, number: int, around: AbstractContextManager[None]) -> Ledger:
    """Ledger of a round of one client of each kind."""
    server, ledger = session.server, Ledger()
    server.begin(number)
    cohort = session.cohort(number, ledger)
    cohort.clients = one_of_each(server.clients)
    with isolated(session.experiment.run.seed, number, SERVER), around:
        session.experiment.algorithm.round(server, cohort)
    return ledger


def one_of_each(clients: Sequence[ClientInfo]) -> tuple[ClientInfo, ...]:
    """The first client of each architecture in each group."""
    first: dict[tuple[str, str], ClientInfo] = {}
    for client in clients:
        first.setdefault((client.group, client.architecture), client)
    return tuple(first.values())


def bytes_by_kind(ledger: Ledger, client: str) -> dict[str, dict[str, int]]:
    """Direction -> kind of bundle -> bytes that crossed between the server and a client."""
    sums: dict[str, dict[str, int]] = {"down": {}, "up": {}}
    for line in ledger.records:
        if line["client"] == client:
            of_way = sums[line["direction"]]
            of_way[line["kind"]] = of_way.get(line["kind"], 0) + line["bytes"]
    return sums


_SELF = Path("/proc/self")
_SLACK = 1 << 20  # bytes that may be freed between the two readings


class PeakMemory:
    """Peak memory since its creation: allocated on a GPU, else resident in this process (on Linux)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        before = _resident().get("VmHWM")
        with contextlib.suppress(OSError):
            (_SELF / "clear_refs").write_text("5")
        after = _resident()
        # containers refuse the reset to the resident size, or ignore it
        self._is_known = bool(after) and (after["VmHWM"] != before or after["VmHWM"] - after["VmRSS"] < _SLACK)

    def read(self) -> int | None:
        """Bytes at the peak; None where the system does not report it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _resident().get("VmHWM") if self._is_known else None


def _resident() -> dict[str, int]:
    """VmHWM and VmRSS in bytes; empty where the system does not report them."""
    with contextlib.suppress(OSError):
        lines = re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
        return {name: int(size) * 1024 for name, size in lines}
    return {}


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        experiment: Its settings.
        clients: All clients of the federation.
        sizes: Client of each kind, or ``server`` -> size of its model.
        moved: Client of each kind -> bytes of a round.
        accounts: Source -> items found, read, and left out.
    """

    experiment: Experiment
    clients: tuple[ClientInfo, ...]
    sizes: Mapping[str, ModelSize]
    moved: Mapping[str, Moved]
    accounts: Accounts

    @classmethod
    def of(cls, experiment: Experiment) -> DryRun:
        """Open the data, build the models, and train in a temporary folder.

        Raises:
            PolyfedError: Settings are inconsistent, or a client fails.
        """
        with tempfile.TemporaryDirectory() as folder, cpu_threads(experiment.run.threads):
            session = Session(without_deadlines(experiment), RunFolder(Path(folder)), "dry")
            session.federation.data.ahead = False
            session.require_sound()
            accounts = accounts_of(experiment, session.federation)
            return cls(experiment, session.federation.infos, *_tried(session), accounts)

    def a_round(self, direction: str) -> dict[str, float]:
        """Kind of bundle -> bytes of all clients in a round, mean over rounds in which clients take part."""
        bundles = dict.fromkeys(bundle for moved in self.moved.values() for bundle in moved[direction])
        return {name: fmean(self._of(cohort, direction, name) for cohort in self._cohorts) for name in bundles}

    def _of(self, cohort: tuple[ClientInfo, ...], direction: str, bundle: str) -> float:
        moved = [self.moved[self._first[_type(client)]][direction].get(bundle, 0.0) for client in cohort]
        # a round waits for the replies of a share of those asked
        return (min(self.experiment.run.pace.most(cohort) / len(cohort), 1.0) if cohort else 0.0) * sum(moved)

    @cached_property
    def _cohorts(self) -> list[tuple[ClientInfo, ...]]:
        run = self.experiment.run
        numbers = range(1, min(run.rounds, _DRAWN) + 1)
        return [run.sampling.draw(self.clients, generator(run.seed, number, "cohort")) for number in numbers]

    @cached_property
    def _first(self) -> dict[tuple[str, str], str]:
        return {_type(client): client.id for client in one_of_each(self.clients)}

    def tables(self) -> list[TextTable]:
        """Participants, bytes of a round and of the run, and protection."""
        rounds, policy = self.experiment.run.rounds, self.experiment.policy
        asked = max(rounds - self.experiment.algorithm.rounds_without_clients, 0)
        crossing = []
        for direction in ("down", "up"):
            bundles = self.a_round(direction)
            for bundle, moved in {**bundles, "all": sum(bundles.values())}.items():
                crossing.append((f"{bundle}, {direction}", mib(moved), mib(asked * moved)))
        notes = ["In MiB, of the first round with clients, without evaluation."]
        protection = [("replies of clients", policy.words()), ("the model from false clients", policy.against_false())]
        participants = []
        for client_type, first in self._first.items():
            samples = [client.samples for client in self.clients if _type(client) == client_type]
            participants.append((client_type[0], count(len(samples)), span_of(samples), *self._size(first)))
        participants.append((SERVER, "", "", *self._size(SERVER)))
        head = ("", "of them", "samples", "parameters", "trained")
        return [
            account_table({source: [count.plain() for count in counts] for source, counts in self.accounts.items()}),
            TextTable("Who takes part", head, participants),
            TextTable("What crosses", ("", "per round", f"{rounds} rounds"), crossing, notes),
            TextTable("What protects it", ("", "by"), protection),
        ]

    def _size(self, participant: str) -> tuple[str, str]:
        size = self.sizes.get(participant)
        return ("-", "-") if size is None else (count(size.parameters), count(size.trained))


def _type(client: ClientInfo) -> tuple[str, str]:
    return client.group, client.architecture


# ---- a round of few samples


def _tried(session: Session) -> tuple[dict[str, ModelSize], dict[str, Moved]]:
    """Sizes of models, and bytes of one client of each kind in the first round with any bytes."""
    experiment = session.experiment
    algorithm = _short(experiment.algorithm)
    session.experiment = experiment.model_copy(update={"algorithm": algorithm})
    few = _FewPublic.of(session)
    site = _FewSamples(**vars(session.hosting.here()))
    site.spec, site.few = site.spec.model_copy(update={"algorithm": algorithm}), few
    session.attach(StrictEngine(site))
    server = session.server
    session.setup()
    few.cut(server)
    first = min(algorithm.rounds_without_clients + 1, experiment.run.rounds)
    for number in range(first, min(first + _TRIED, experiment.run.rounds + 1)):
        preparing(f"a batch of each kind of client, round {number}")
        ledger = one_round(session, number, nullcontext())
        if ledger.records or not algorithm.asks_clients:
            break
    moved = {client.id: few.scaled(bytes_by_kind(ledger, client.id)) for client in one_of_each(server.clients)}
    return model_sizes(session), moved


def _short(settings: _S) -> _S:
    """The settings with each number of epochs or steps at 1."""
    changed: dict[str, Any] = {}
    for name, value in settings:
        if isinstance(value, Settings):
            changed[name] = _short(value)
        elif isinstance(value, int) and value > 1 and name.endswith(_LENGTHS):
            changed[name] = 1
    return settings.model_copy(update=changed)


@dataclass(frozen=True)
class _FewPublic:
    """A batch of public samples, complete items.

    Attributes:
        index: Positions in the public set.
        share: Share of the samples that are exchanged in a round.
        most: Largest number of samples of a batch.
    """

    index: Int64[Tensor, " k"]
    share: float = 1.0
    most: int = _ENOUGH

    @classmethod
    def of(cls, session: Session) -> _FewPublic:
        public, experiment = session.federation.public_samples({}), session.experiment
        most = _ENOUGH if resolve_device(experiment.run.device).type == "cpu" else sys.maxsize
        if public is None:
            return replace(_NOTHING, most=most)
        exchange = getattr(experiment.algorithm, "public", None)
        wanted = exchange.samples if isinstance(exchange, PublicExchange) else None
        drawn = torch.randperm(len(public), generator=generator(experiment.run.seed, "dry run"))[:wanted].sort().values
        trainings = [group.training for group in experiment.clients.values()]
        trainings += [experiment.server.training] if experiment.server else []
        size = max(training.batch_size for training in trainings)
        items = public.items[drawn]
        few = drawn[items <= items[: min(size, most)][-1]]
        return cls(few, len(few) / len(drawn), most)

    def cut(self, participant: Participant) -> None:
        """Reduce a participant's public set to these, and its other parts by the same share."""
        public = participant.public
        if public.pairs is None:
            return
        parts = {name: _first(part, max(2, round(self.share * len(part)))) for name, part in public.parts.items()}
        participant.public = replace(public, pairs=public.pairs.subset(self.index), parts=parts)

    def scaled(self, moved: Moved) -> Moved:
        """Bytes of an exchange of the complete public set."""
        return {
            direction: {name: size / self.share if name in _ROWS else size for name, size in bundles.items()}
            for direction, bundles in moved.items()
        }


_NOTHING = _FewPublic(torch.arange(0))


@dataclass
class _FewSamples(Site):
    """A site whose clients have one batch of private and one of public samples."""

    few: _FewPublic = _NOTHING

    def build_client(self, *given: Any, **named: Any) -> Client:
        client = super().build_client(*given, **named)
        size = min(client.training.batch_size, self.few.most)
        client.train = _first(client.train, size)
        client.server_encoders = client.server_encoders and _FewGuided(client.server_encoders, size)
        self.few.cut(client)
        return client


@dataclass(frozen=True)
class _FewGuided:
    """The server's encoders at a client with few samples."""

    encoders: ServerEncoders
    size: int

    def model(self, weights: Mapping[str, Tensor]) -> Model:
        return self.encoders.model(weights)

    @property
    def train(self) -> Samples:
        return _first(self.encoders.train, self.size)

    @property
    def test(self) -> Samples | None:
        return self.encoders.test


def _first(samples: Samples, size: int) -> Samples:
    return samples.subset(torch.arange(min(size, len(samples))))
