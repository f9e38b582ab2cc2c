"""Sinks: trackers outside polyfed, such as TensorBoard, that follow a run round by round."""

from __future__ import annotations

import importlib
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.core.extras import how_to_install
from polyfed.core.settings import Settings
from polyfed.runs.config_files import with_paths
from polyfed.runs.events import Callback, Event, Recorder, RoundComplete, RunStarted
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import SERVER

log = logging.getLogger(__name__)
Record = Mapping[str, Any]

_PLACES = ("dir", "weights_dir", "cache_dir")
_TOLD = ("name", "columns", "targets")  # of a source


@dataclass(frozen=True)
class SinkRun:
    """Facts of a run for a sink that follows it.

    Attributes:
        folder: the run folder; all that a sink keeps on disk belongs below it.
        name: name of the run, for people.
        config: the resolved configuration, as ``public_settings`` has it.
        run_id: the same for all processes that ever work on the run, and for no other run.
        resumed_from: last complete round when the run was resumed, 0 for a new run.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    run_id: str
    resumed_from: int = 0


class SinkWriter(ABC):
    """A sink at work on one run."""

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Take over one complete round of ``round_records``; called once per round, in order."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """The process leaves the run; ``failed`` if by an error."""


class Sink(Settings):
    """A tracker that a run reports to. Subclasses live in ``polyfed.reporting.sinks``."""

    home: ClassVar[str] = "polyfed.reporting.sinks"

    per_client: bool = Field(
        default=True, description="report each client by its id; otherwise only means over the clients of a round"
    )

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages that it imports, given its settings; empty for a sink that needs none."""
        return ()

    def require(self) -> None:
        """Check that the packages of this sink are there.

        Raises:
            ConfigError: one cannot be imported; the message has the command that installs it.
        """
        for package in self.packages:
            try:
                importlib.import_module(package)
            except ImportError as error:
                hint = how_to_install(self.pip_extra) if self.pip_extra else f"pip install {package}"
                raise ConfigError(
                    f"the sink '{self.component_name()}' needs the package '{package}' ({error}); "
                    f"install it ({hint}) or take the sink out of the configuration"
                ) from error

    @abstractmethod
    def open(self, run: SinkRun) -> SinkWriter:
        """Begin to follow a run, or go on with it after ``run.resumed_from``.

        Raises:
            Exception: whatever the tracker raises; ``Trackers`` makes it a ConfigError.
        """


class Trackers(Callback):
    """Gives each complete round to the sinks of a run; one that fails while the run goes on is switched off.

    As a context it closes them, as failed on an error.

    Args:
        sinks: Sinks to report to, if any.
        run: Facts for them, when it starts.
    """

    def __init__(self, sinks: Iterable[Sink], run: SinkRun) -> None:
        self._sinks, self._run = tuple(sinks), run
        self._writers: dict[int, SinkWriter] = {}
        self._recorder = Recorder()

    def handle(self, event: Event) -> None:
        """Open the sinks when the run starts, and write to them when a round is complete.

        Raises:
            ConfigError: a sink of a new run cannot be opened, and none is left open. A resumed run goes on without it:
                its configuration is fixed, and its rounds are worth more than a tracker.
        """
        self._recorder.handle(event)
        if isinstance(event, RunStarted):
            self._open(replace(self._run, resumed_from=event.done))
        elif isinstance(event, RoundComplete):
            # texts of events may name files or values
            records = [{**record, "reason": ""} if "reason" in record else record for record in self._recorder.take()]
            made = round_records(event.round, records, event.up, event.down, seconds=event.seconds)
            for number, writer in list(self._writers.items()):
                if not self._tried(number, partial(writer.write, made)):
                    try:
                        self._writers.pop(number).close(failed=True)
                    except Exception:
                        log.debug("a sink that had failed cannot be closed", exc_info=True)

    def _open(self, run: SinkRun) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                sink.require()
                self._writers[number] = sink.open(run)
            except Exception as error:  # trackers raise whatever their network or server raised
                if not RunFolder(run.folder).has_checkpoints():  # then no work is lost
                    self._close(failed=True)
                    raise _unopened(sink, error) from error
                log.warning("%s; the run goes on without it", _unopened(sink, error))

    def _close(self, failed: bool) -> None:
        for number, writer in list(self._writers.items()):
            self._tried(number, partial(writer.close, failed))
            del self._writers[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._close(failed=error_type is not None)

    def _tried(self, number: int, call: Callable[[], None]) -> bool:
        """Whether ``call`` succeeded; a failure of a tracker must not stop hours of training."""
        try:
            call()
        except Exception as error:
            name = self._sinks[number].component_name()
            log.warning("the sink '%s' failed and is switched off: %s: %s", name, type(error).__name__, error)
            return False
        return True


def public_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for trackers: without paths, texts of sources but their columns, and settings of sinks."""
    known: dict[str, Any] = with_paths(content, lambda path: Path("..."))
    data = {key: value for key, value in known["data"].items() if key not in _PLACES}
    sources = {name: _without_texts(source) for name, source in data["sources"].items()}
    output = known["run"]["output"]
    shown = output | {"sinks": [sink["name"] for sink in output["sinks"]]}
    return {**known, "data": data | {"sources": sources}, "run": known["run"] | {"output": shown}}


def _without_texts(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source, or one within it, without paths and whatever else may name files or people."""
    inner = {key: _without_texts(value) for key, value in source.items() if isinstance(value, Mapping)}
    known = {key: value for key, value in source.items() if key in _TOLD or isinstance(value, int | float)}
    return inner | known


def _unopened(sink: Sink, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError(
        f"the sink '{sink.component_name()}' cannot be opened ({type(error).__name__}: {error}); "
        "mend its settings or take it out of the configuration"
    )


# ---- what a round is made of


def round_records(
    number: int, metrics: Sequence[Record], up: int = 0, down: int = 0, *, seconds: float | None = None
) -> list[Record]:
    """A round as sinks get it: its lines of metrics.jsonl, and one each of kind ``traffic`` and ``timing``.

    Args:
        number: the round.
        metrics: metrics and events.
        up, down: bytes that crossed.
        seconds: wall time; None where none is measured, as for round 0.
    """
    common = {"round": number, "participant": SERVER}
    timing = [] if seconds is None else [{**common, "kind": "timing", "metrics": {"seconds": seconds}}]
    return [*metrics, {**common, "kind": "traffic", "metrics": {"bytes_up": up, "bytes_down": down}}, *timing]


def round_points(records: Sequence[Record], *, per_client: bool = True) -> dict[str, float]:
    """Points of one round by the name of their curve; without clients by id if ``per_client`` is false.

    ``server/test/r1_sum``, ``client/<id>/test/accuracy``, ``clients/test/accuracy`` (the mean over the clients measured
    in this round whose value is finite), ``events/client_excluded`` (how many).

    Args:
        records: One round of ``round_records``, not empty.
        per_client: whether clients are named.
    """
    values: dict[str, float] = {}
    of_clients: dict[str, list[float]] = {}  # of this round's cohort: clients that were not asked have no new value
    events = Counter(record["event"] for record in records if record["kind"] == "event")
    for record in records:
        who, is_server = record["participant"], record["participant"] == SERVER
        for metric, value in record.get("metrics", {}).items():
            name = f"{record['kind']}/{metric}"
            if not is_server:
                of_clients.setdefault(name, []).append(float(value))
            if is_server or per_client:
                values[f"{SERVER if is_server else f'client/{who}'}/{name}"] = float(value)
    for name, own in of_clients.items():
        # one client whose loss is infinite must not hide the curve of all others; its own curve shows it
        finite = [value for value in own if math.isfinite(value)]
        values[f"clients/{name}"] = fmean(finite) if finite else math.nan
    return values | {f"events/{name}": float(number) for name, number in events.items()}
