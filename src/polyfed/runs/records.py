"""Records of a run folder, read back with types; those of a killed run too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from polyfed.core.activity import SERVER as SERVER
from polyfed.core.errors import ConfigError, RunError, nearest
from polyfed.core.extras import brought_by
from polyfed.core.moved import with_moved
from polyfed.core.untrusted import file_json, typed, yaml_content
from polyfed.privacy.accounting import between_sets
from polyfed.runs.events import Incident, Measured
from polyfed.runs.folder import untrained_best

if TYPE_CHECKING:  # numpy takes a quarter of a second, which few commands need
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

SITE_REFUSED = "site_refused"
"""Event of a node that claimed to be another site than that of its key, or changed its key."""
ATTACKER = "attacker"
"""Event before the first round of a client that ``run.attackers`` makes attack."""
PRIVACY = "privacy"
"""Kind of the measurements of what clients gave away: epsilon, and number of protected replies."""
PACE = "pace"
"""Kind of the measurements of virtual time: seconds since the run began, and how late replies were."""
_COLUMNS = {
    "metrics": ("round", "participant", "group", "kind", "metric", "value"),
    "events": ("round", "participant", "event", "cause", "reason"),
    "traffic": ("round", "client", "group", "direction", "step", "bundle", "kind", "dtype", "bytes", "full"),
    "rounds": ("round", "seconds", "up", "down"),
}
_MOST_ROUNDS = 1_000_000
_T = TypeVar("_T")
_Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One line of the ledger: bytes of one bundle of one message, and those of it whole and in fp32, if known."""

    round: int
    client: str
    direction: str
    step: str
    bundle: str
    kind: str
    dtype: str
    bytes: int
    full: int | None = None

    @property
    def full_bytes(self) -> int:
        """Bytes in fp32 and without compression; the bytes that crossed where the line has no such figure."""
        return self.bytes if self.full is None else self.full


@dataclass(frozen=True, slots=True)
class PartitionEntry:
    """Data of a client: items and samples of a source's split, counted by class where there are labels."""

    group: str
    source: str
    split: str
    items: int
    samples: int
    labels: Mapping[str, int] | None = None
    index: tuple[int, ...] = ()
    columns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # column -> value -> items
    test: Mapping[str, Any] | None = None  # items of its own test, by class likewise, where that split is dealt out
    left_out: Mapping[str, int] = field(default_factory=dict)  # column -> items left out: they have no value there
    missing: Mapping[str, int] = field(default_factory=dict)  # modality -> items of its own source that lack it
    # what of ``items`` and ``samples`` is of the public set or a second source: ``public`` (whether it is of the public
    # set), ``source``, ``split``, ``items``, ``samples``, ``labels`` and ``index``; other counts are of its own source
    also: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of a round, and CPU time of the method in it: of the run's process, evaluation left out."""

    round: int
    seconds: float
    cpu: float = math.nan


@dataclass(frozen=True, slots=True)
class ChosenRound:
    """The round whose server model is the run's model.

    Attributes:
        number: Number of the round.
        metric: name of the validation metric that chose it; empty where nothing was validated, and the last counts.
        value: Value of that metric on validation, NaN likewise.
    """

    number: int
    metric: str = ""
    value: float = math.nan

    def __str__(self) -> str:
        why = f"best on validation ({self.metric} {self.value:,.2f})" if self.metric else "the last"
        return f"model of round {self.number}, {why}"


def best_round(values: Mapping[int, float]) -> int | None:
    """Round of the highest value, of equal ones the earliest after training began; None where all are NaN.

    Round 0, the model before any training, is the best only if it is better than all others.
    """
    numbers = (number for number, value in values.items() if not math.isnan(value))
    return max(numbers, key=lambda number: (values[number], number > 0, -number), default=None)


def sites_among(groups: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Names of the groups that are sites: of one client each, with a source that no other group has.

    None are unless there are two at least, and no group has more clients than one.

    Args:
        groups: name -> number of clients, and name of their source.
    """
    sources = Counter(str(source) for _, source in groups.values())
    sites = tuple(name for name, (_, source) in groups.items() if sources[str(source)] == 1)
    return sites if len(sites) > 1 and all(number == 1 for number, _ in groups.values()) else ()


@dataclass(frozen=True)
class RunRecords:
    """Records of a run, in the order in which they were written."""

    folder: Path
    measurements: tuple[Measured, ...] = ()
    events: tuple[Incident, ...] = ()  # what befell the run, such as that it was resumed, then all else
    transfers: tuple[Transfer, ...] = ()  # the ledger
    seconds: Mapping[int, float] = field(default_factory=dict)  # round -> wall time
    cpu: Mapping[int, float] = field(default_factory=dict)  # round -> CPU seconds of the method, where they are known
    holdings: Mapping[str, PartitionEntry] = field(default_factory=dict)  # client id -> in the order of the partition
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved; empty if it was not written
    warnings: tuple[str, ...] = ()  # what could not be read, or must be known of the run, one sentence each

    @classmethod
    def load(cls, folder: Path) -> RunRecords:
        """Read a run folder; files that the run has not written (yet) count as empty.

        Raises:
            RunError: the folder does not exist, or a file is damaged anywhere but in a cut-off last line.
        """
        if not folder.is_dir():
            raise RunError(f"no run folder '{folder}'; give the folder that the run printed at its end")
        warnings: list[str] = []
        lines = list(_lines(folder / "metrics.jsonl", warnings))
        history = list(_lines(folder / "history.jsonl", warnings))
        measured = ((at, line) for at, line in lines if line.get("kind") != "event")
        measurements = _typed(Measured, measured, "measurement")
        transfers = _typed(Transfer, _lines(folder / "ledger.jsonl", warnings), "transfer")
        times = _typed(Timing, _lines(folder / "timing.jsonl", warnings), "timing")
        clients = mapping_in(folder / "partition.json", file_json)
        entries = ((f"partition.json entry '{client}'", entry) for client, entry in clients.items())
        config = with_moved(mapping_in(folder / "config.yaml", yaml_content), warns=False)
        privacy = _with_privacy(measurements, config)
        incidents = ((at, _incident(line)) for at, line in history + lines if "event" in line)
        events = _typed(Incident, incidents, "event")
        rounds: Iterable[Measured | Incident | Transfer | Timing] = chain(measurements, events, transfers, times)
        for record in rounds:
            if not 0 <= record.round <= _MOST_ROUNDS:
                odd = f"'{folder}' has a record of round {record.round}"
                raise RunError(f"{odd}; rounds are from 0 to {_MOST_ROUNDS:,}")
        return cls(
            folder=folder,
            measurements=measurements,
            events=events,
            transfers=transfers,
            seconds={time.round: time.seconds for time in times},
            cpu={time.round: time.cpu for time in times if math.isfinite(time.cpu)},
            holdings=dict(zip(clients, _typed(PartitionEntry, entries, "holding"), strict=True)),
            config=config,
            warnings=(*warnings, *filter(None, [untrained_best(folder), _with_attackers(events), privacy])),
        )

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the configuration; empty if there is none, or none of this form."""
        section = self.config.get(name)
        return section if isinstance(section, Mapping) else {}

    def number(self, name: str) -> int | None:
        """A whole number of the section ``run``, such as ``seed``; None if it is not there, or none."""
        value = self.section("run").get(name)
        return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None

    @cached_property
    def rounds(self) -> int:
        """Number of the last round with any record, 0 if there is none."""
        measured = (record.round for record in self.measurements)
        sent = (transfer.round for transfer in self.transfers)
        return max((*measured, *sent, *self.seconds), default=0)

    @cached_property
    def clients(self) -> tuple[str, ...]:
        measured = (record.participant for record in self.measurements if record.participant != SERVER)
        return tuple(dict.fromkeys((*self.holdings, *measured, *(transfer.client for transfer in self.transfers))))

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group -> its client ids; clients outside the partition form the group ``clients``."""
        groups: dict[str, list[str]] = {}
        for client in self.clients:
            groups.setdefault(self.holdings[client].group if client in self.holdings else "clients", []).append(client)
        return {group: tuple(clients) for group, clients in groups.items()}

    @cached_property
    def site_names(self) -> tuple[str, ...]:
        """Clients that are institutions with data of their own, by the configuration (``sites_among``); of a deployment
        those that are called as ``run.engine.sites`` are."""
        groups = {name: group for name, group in self.section("clients").items() if isinstance(group, Mapping)}
        sites = sites_among({name: (group.get("count"), group.get("source")) for name, group in groups.items()})
        engine = self.section("run").get("engine")
        deployed = engine.get("sites") if isinstance(engine, Mapping) else ()
        return tuple(name for name in self.clients if name in (sites or deployed or ()))

    def metric_names(self, participant: str, kind: str = "test") -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for record in self._of(participant, kind) for name in record.metrics))

    def series(self, participant: str, metric: str, kind: str = "test") -> dict[int, float]:
        """Round -> value, rounds ascending; of two records of one round (a resumed run) the later counts."""
        values = {one.round: one.metrics[metric] for one in self._of(participant, kind) if metric in one.metrics}
        return dict(sorted(values.items()))

    @cached_property
    def chosen(self) -> ChosenRound:
        """The round of the run's model, which is saved as ``best``: the ``best_round`` of the validation values.

        The metric is the first of a validation, which is the primary one of the server's task. Without validation the
        last round counts, as it always does of clients, whose newest models are kept.
        """
        metric = next(iter(self.metric_names(SERVER, "validation")), "")
        if (best := self.best(SERVER, metric, "validation")) is not None:
            return ChosenRound(best[0], metric, best[1])
        return ChosenRound(max((record.round for record in self._of(SERVER, "test")), default=self.rounds))

    def metrics(self, participant: str, kind: str = "test") -> Mapping[str, float]:
        """Metrics of the run's model: the server's of the chosen round, a client's of its last evaluation."""
        record = self._measured(participant, kind, self._round_of_model(participant))
        return record.metrics if record is not None else {}

    def interval(self, participant: str, metric: str) -> tuple[float, float] | None:
        """95 % interval over test items of what ``metrics`` has; None in records without it."""
        record = self._measured(participant, "test", self._round_of_model(participant))
        ends = record.intervals.get(metric) if record is not None else None
        return None if ends is None else (float(ends[0]), float(ends[1]))

    def last(self, participant: str, kind: str = "test") -> Mapping[str, float]:
        """Metrics of the last round in which the participant was measured; empty if it never was."""
        record = self._measured(participant, kind, None)
        return record.metrics if record is not None else {}

    def last_rounds(self, participants: Iterable[str], kind: str = "test") -> list[int]:
        """Rounds of the last evaluations of participants, ascending, each once."""
        measured = [self._of(participant, kind) for participant in participants]
        return sorted({max(record.round for record in records) for records in measured if records})

    def _round_of_model(self, participant: str) -> int | None:
        return self.chosen.number if participant == SERVER else None

    def _measured(self, participant: str, kind: str, number: int | None) -> Measured | None:
        """The record of a round; None: of the last. Of two of one round (a resumed run) the later counts."""
        by_round = {record.round: record for record in self._of(participant, kind)}
        return by_round.get(max(by_round, default=0) if number is None else number)

    def best(self, participant: str, metric: str, kind: str = "test") -> tuple[int, float] | None:
        """Round and value of the highest value, of several that of ``best_round``; None where there is none."""
        series = self.series(participant, metric, kind)
        number = best_round(series)
        return None if number is None else (number, series[number])

    def excluded(self) -> tuple[Incident, ...]:
        return tuple(event for event in self.events if event.incident == "client_excluded")

    def clipped(self) -> tuple[Incident, ...]:
        return tuple(event for event in self.events if event.incident == "update_clipped")

    @property
    def replies_in_words(self) -> str:
        """How many replies of clients did not count as they came."""
        return f"replies: {len(self.clipped())} clipped, {len(self.excluded())} excluded"

    def bytes_per_round(self, direction: str) -> dict[int, int]:
        """Round -> bytes that crossed ``down`` or ``up``, rounds ascending."""
        totals: Counter[int] = Counter()
        for transfer in self.transfers:
            totals[transfer.round] += transfer.bytes if transfer.direction == direction else 0
        return dict(sorted(totals.items()))

    def total_bytes(self, direction: str | None = None) -> int:
        return sum(transfer.bytes for transfer in self.transfers if direction in (None, transfer.direction))

    def full_bytes(self) -> int:
        """Bytes that would have crossed in fp32 and without compression, as far as that is known."""
        return sum(transfer.full_bytes for transfer in self.transfers)

    def arrays(self) -> dict[str, dict[int, ClientArray]]:
        """Name -> round -> array [clients, samples] that the run kept, such as aggregation weights.

        Raises:
            RunError: a file is damaged.
        """
        return read_arrays(self.folder / "arrays")

    def frame(self, table: Literal["metrics", "events", "traffic", "rounds"]) -> pd.DataFrame:
        """Records as a pandas frame, a row a record.

        Args:
            table: ``metrics`` with the columns round, participant, group (``server`` for the server), kind, metric
                and value; ``events`` with round, participant, event, cause and reason; ``traffic``, the ledger, with
                round, client, group, direction, step, bundle, kind, dtype, bytes, and in full the bytes in fp32 without
                compression; or ``rounds`` with round, seconds, and the bytes up and down.

        Raises:
            ConfigError: the table does not exist.
        """
        if table not in _COLUMNS:
            raise ConfigError(f"to_pandas: no table '{table}'; {nearest(table, _COLUMNS)}")
        with brought_by("frames"):
            import pandas as pd

        return pd.DataFrame(list(self._rows(table)), columns=list(_COLUMNS[table]))

    def _rows(self, table: str) -> Iterable[tuple[Any, ...]]:
        if table == "metrics":
            return [
                (record.round, record.participant, self._group_of.get(record.participant, SERVER), record.kind, *item)
                for record in self.measurements
                for item in record.metrics.items()
            ]
        if table == "events":
            return [(one.round, one.participant, one.incident, one.cause, one.reason) for one in self.events]
        if table == "traffic":
            return [
                (entry.round, entry.client, self._group_of[entry.client], *astuple(entry)[2:-1], entry.full_bytes)
                for entry in self.transfers
            ]
        up, down, seconds = self.bytes_per_round("up"), self.bytes_per_round("down"), self.seconds
        return [(k, seconds.get(k, math.nan), up.get(k, 0), down.get(k, 0)) for k in range(1, self.rounds + 1)]

    @cached_property
    def _group_of(self) -> dict[str, str]:
        return {client: group for group, clients in self.groups.items() for client in clients}

    def _of(self, participant: str, kind: str) -> Sequence[Measured]:
        return self._by_participant.get((participant, kind), ())

    @cached_property
    def _by_participant(self) -> dict[tuple[str, str], list[Measured]]:
        by_participant: dict[tuple[str, str], list[Measured]] = {}
        for record in self.measurements:
            by_participant.setdefault((record.participant, record.kind), []).append(record)
        return by_participant


def _incident(line: _Line) -> _Line:
    """A line of an event, by the names that events have today."""
    return {**line, "incident": "update_clipped" if line["event"] == "update_shortened" else line["event"]}


def _with_attackers(events: Iterable[Incident]) -> str:
    """In words that a run is an experiment with attackers, if it is."""
    names = [event.participant for event in events if event.incident == ATTACKER]
    if not names:
        return ""
    return (
        f"this is an experiment with attackers: run.attackers makes {len(names)} clients attack ({', '.join(names)}), "
        "and no figure is that of an honest federation"
    )


def _with_privacy(measurements: Iterable[Measured], config: Mapping[str, Any]) -> str:
    """In words what the clients of a protected run gave away, and what is not counted."""
    largest = max((record.metrics["epsilon"] for record in measurements if record.kind == PRIVACY), default=None)
    if largest is None or not (settings := config.get("privacy")):
        return ""
    clear = "; test metrics of clients crossed as they are, which this does not cover"
    try:
        between = between_sets(bool(settings.get("samples")), settings["neighbours"])
        metrics, shown = settings["metrics"], f"{settings['budget']['delta']:g}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"config.yaml: 'privacy' is damaged ({type(error).__name__}: {error}); restore it") from error
    return (
        f"replies of clients are differentially private: no client gave away more than epsilon {largest:.3g} at delta "
        f"{shown}, between {between}{clear if metrics == 'clear' else ''}"
    )


def _lines(path: Path, warnings: list[str]) -> Iterator[tuple[str, _Line]]:
    """Lines of a JSON-lines file with where they stand; a cut-off last line is left out and reported."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = file_json(line)
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}, not an object")
            yield f"{path.name} line {number}", content
        except ValueError as error:
            if number < len(lines):
                raise RunError(f"{path.name} line {number} is damaged: {error}; restore {path} or delete it") from error
            warnings.append(f"{path.name}: the last line is cut off (the run was killed) and left out")


def _typed(record_class: type[_T], lines: Iterable[tuple[str, _Line]], noun: str) -> tuple[_T, ...]:
    records = []
    for where, line in lines:
        try:
            records.append(typed(record_class, line))
        except ValueError as error:
            raise RunError(f"{where} is not a valid {noun}: {error}; is it of another version of polyfed?") from error
    return tuple(records)


def mapping_in(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Content of a file of a run folder; empty without the file.

    Raises:
        RunError: it is damaged.
    """
    try:
        content = (parse(path.read_text("utf-8")) or {}) if path.exists() else {}
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a mapping")
    except (OSError, ValueError) as error:
        raise RunError(f"{path.name} is damaged: {' '.join(str(error).split())}; restore {path}") from error
    return content


@dataclass(frozen=True)
class ClientArray:
    """One value a client and sample.

    Attributes:
        clients: client ids, one a row.
        values: [clients, samples].
    """

    clients: tuple[str, ...]
    values: NDArray[np.float64]


def read_arrays(folder: Path) -> dict[str, dict[int, ClientArray]]:
    """Name -> round -> array, both ascending.

    Raises:
        RunError: a file is damaged.
    """
    arrays: dict[str, dict[int, ClientArray]] = {}
    for path in sorted(folder.glob("*/round-*.safetensors")):
        arrays.setdefault(path.parent.name, {})[int(path.stem.removeprefix("round-"))] = _read(path)
    return arrays


def _read(path: Path) -> ClientArray:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            values = opened.get_tensor("values")
            clients = file_json(opened.metadata()["clients"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"array {path.parent.name}/{path.name} is damaged: {error}; delete {path}") from error
    if values.ndim != 2 or len(values) != len(clients):
        raise RunError(f"array {path} has shape {values.shape} for {len(clients)} clients; delete it")
    return ClientArray(tuple(clients), values.astype("float64"))
