"""The bytes of a round before anybody has data or weights: of the models' sizes and the number of public items."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.data.view import View
from polyfed.engines.local import LocalEngine
from polyfed.lab.analysis.cost import bytes_by_kind, one_of_each, one_round, unhurried
from polyfed.lab.analysis.random_networks import RandomNetworks
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.traffic import WAYS
from polyfed.models.model import ModelSettings
from polyfed.reporting.tables import TextTable, count, mib
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.session import Session

WORDS = 30_522
"""Size of the vocabulary of BERT (uncased), in place of tokenizers that are files."""

_TRIED = (2, 3)  # public items of the two rounds that are run: batch statistics need two samples
_EPOCHS = "local_epochs"
_LENGTHS = (_EPOCHS, "local_steps", "robust_steps")  # how long clients train changes no byte


Line = tuple[str, str, str]
"""Group, direction and kind of bundle."""


class Growth(NamedTuple):
    """Bytes of one client in a round: a part that does not depend on public items, and so many for each of them."""

    fixed: float
    an_item: float


@dataclass(frozen=True)
class PlannedTraffic:
    """Bytes of a round of an experiment.

    Attributes:
        experiment, method: its name and its algorithm.
        public: public items that are exchanged in a round; 0 without a public set.
        lines: group, direction and kind -> bytes of one client.
        counts: group -> clients.
    """

    experiment: str
    method: str
    public: int
    lines: Mapping[Line, Growth]
    counts: Mapping[str, int]

    def bytes(self, group: str, direction: str, kind: str) -> float:
        """Of one client of a group in a round."""
        fixed, an_item = self.lines[group, direction, kind]
        return fixed + self.public * an_item

    def total(self, group: str, direction: str) -> float:
        return sum(self.bytes(*line) for line in self.lines if line[:2] == (group, direction))

    def to_json(self) -> dict[str, Any]:
        """All figures, in bytes."""

        def kinds(group: str, way: str, part: int) -> dict[str, float]:
            return {line[2]: growth[part] for line, growth in self.lines.items() if line[:2] == (group, way)}

        groups = {
            group: {
                "clients": clients,
                **{way: {"total": self.total(group, way), "fixed": kinds(group, way, 0)} for way in WAYS},
                "an_item": {way: kinds(group, way, 1) for way in WAYS},
            }
            for group, clients in self.counts.items()
        }
        return {"experiment": self.experiment, "method": self.method, "public_items": self.public, "groups": groups}

    def result(self) -> AnalysisResult:
        """What one client of each group sends and receives in a round, and by kind."""
        totals = [
            (f"{group} ({clients} clients)", *(mib(self.total(group, way)) for way in WAYS))
            for group, clients in self.counts.items()
        ]
        kinds = [
            (f"{group}: {kind}, {way}", f"{growth.fixed:,.0f}", f"{growth.an_item:,.1f}")
            for (group, way, kind), growth in self.lines.items()
        ]
        title = f"A client in a round of {self.experiment} ({self.method})"
        title += f", {count(self.public)} public items" if self.public else ""
        note = "Of blank data and models of the same size; what the values of outputs decide is not known before a run."
        tables = [
            TextTable(title, ("group", "MiB down", "MiB up"), totals, (note,)),
            TextTable("Bytes by kind", ("group: kind", "fixed", "a public item"), kinds),
        ]
        return AnalysisResult(self.to_json(), tables)


def planned_traffic(experiment: Experiment, classes: Mapping[str, int], words: int = WORDS) -> PlannedTraffic:
    """Run a round twice with a few blank public items, and go on from there: bytes grow in proportion to these.

    No data and no pretrained weights are read, but of encoders ``hf`` their ``config.json``. Private data, how long
    clients train and how precisely they compute change no byte; what a method sends by the values of its outputs alone
    does, and is not known before.

    Args:
        experiment: its settings.
        classes: source -> classes of its targets.
        words: size of vocabularies that are files.

    Raises:
        ConfigError: a view needs what cannot be made up, or the number of classes is missing.
    """
    exchanged = 0 if experiment.public is None else _exchanged(experiment)
    with tempfile.TemporaryDirectory() as place:
        networks = RandomNetworks(experiment.data.weights_folder, Path(place))
        tried = [_tried(experiment, stand_in(experiment, classes, items, networks, words)) for items in _TRIED]
    lines = {}
    for line, moved in tried[0].items():
        slope = (tried[1][line] - moved) / (_TRIED[1] - _TRIED[0])
        lines[line] = Growth(moved - _TRIED[0] * slope, slope)
    counts = {group: settings.count for group, settings in experiment.clients.items()}
    return PlannedTraffic(experiment.name, experiment.algorithm.component_name(), exchanged, lines, counts)


def _exchanged(experiment: Experiment) -> int:
    public, exchange = experiment.public, getattr(experiment.algorithm, "public", None)
    drawn = exchange.samples if isinstance(exchange, PublicExchange) else None
    assert public is not None
    if public.items is None:
        raise ConfigError("public.items is all of a source that is not read; give a number: --set public.items=N")
    return public.items if drawn is None else min(public.items, drawn // (public.per_item or 1))


def _tried(experiment: Experiment, blank: Experiment) -> dict[Line, int]:
    """Bytes of the first client of each group in the first round."""
    with tempfile.TemporaryDirectory() as folder, cpu_threads(experiment.run.threads):
        session = Session(blank, RunFolder(Path(folder)), "planned")
        session.require_sound()
        session.attach(LocalEngine(session.hosting.here()))
        blank.algorithm.setup(session.server)
        ledger = one_round(session, 1, nullcontext())
        clients = {client.group: client.id for client in reversed(one_of_each(session.server.clients))}
        return {
            (group, way, kind): moved
            for group in experiment.clients
            for way, kinds in bytes_by_kind(ledger, clients[group]).items()
            for kind, moved in kinds.items()
        }


# ---- the same experiment without data and weights


def stand_in(
    experiment: Experiment, classes: Mapping[str, int], items: int, networks: RandomNetworks, words: int = WORDS
) -> Experiment:
    """The experiment over blank data, with ``items`` public ones and models of the same size that start at random.

    Raises:
        ConfigError: as ``planned_traffic``.
    """
    content = experiment.model_dump(mode="json")
    for model in _models(content):
        model["encoders"] = {name: _at_random(own, networks, words) for name, own in model["encoders"].items()}
    content["data"]["sources"] = _blank_sources(Experiment.parse(content), classes, items)
    for group in content["clients"].values():
        group["items"] = "public" if group["items"] == "public" else None
        group |= {"split": "train", "partition": "iid", "test": "all", "test_split": None, "test_items": None}
        group["also"] = group["also"] and group["also"] | {"items": None, "partition": "iid"}
    if content["server"]:
        content["server"] |= {"expected_test_items": None, "test_split": "test", "validation_split": None}
    if content["public"]:
        content["public"] |= {"items": items, "split": "public", "without": {}}
    _shorten(content["algorithm"])
    # half precision saves nothing on a few samples, and not every processor has it
    content["run"]["precision"] = "float32"
    blank = Experiment.parse(content)
    return unhurried(blank)


def _shorten(method: dict[str, Any]) -> None:
    # epochs act only where no number of steps is given
    method |= {name: 1 for name in _LENGTHS if method.get(name) and not (name == _EPOCHS and method.get("local_steps"))}
    if isinstance(teacher := method.get("teacher"), dict) and "steps" in teacher:
        teacher["steps"] = 1
    if method.get("public"):
        method["public"]["samples"] = None
    if method.get("warmup_rounds"):  # in which nobody is asked
        method["warmup_rounds"] = 0


def _models(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if content["server"]:
        yield content["server"]["model"]
    for group in content["clients"].values():
        yield from group["models"]


def _at_random(encoder: dict[str, Any], networks: RandomNetworks, words: int) -> dict[str, Any]:
    if encoder["name"] == "hf":
        return networks.stand_in(encoder)
    encoder |= {key: empty for key, empty in (("weights", None), ("vectors", [])) if key in encoder}
    tokenizer = encoder["view"].get("tokenizer")
    if tokenizer is not None:
        encoder["view"]["tokenizer"] = {"name": "hashing", "size": tokenizer.get("size", words)}
    return encoder


def _blank_sources(experiment: Experiment, classes: Mapping[str, int], items: int) -> dict[str, dict[str, Any]]:
    """Source -> what replaces it: two rows for each client, as a batch of one sample is none, and the public set."""
    contents = _contents(experiment)
    rows = 2 * sum(group.count for group in experiment.clients.values()) + items
    return {
        name: {
            "name": "blank",
            "rows": rows,
            "columns": {
                modality: of
                for modality, of in source.columns.items()
                if (of if isinstance(of, str) else of[0]) in contents[name]
            },
            "targets": dict(source.targets),
            "content": contents[name] | {column: _classes(name, classes) for column in source.targets.values()},
        }
        for name, source in experiment.data.sources.items()
        if contents[name]
    }


def _contents(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Source -> column of a modality that somebody reads -> what it holds."""
    contents: dict[str, dict[str, Any]] = {name: {} for name in experiment.data.sources}
    public = None if experiment.public is None else experiment.public.source
    for name, model in _uses(experiment):
        columns = experiment.data.sources[name].columns
        for modality in model.encoders.keys() & columns.keys():
            view = model.encoders[modality].view
            content = _content(view, f"{name}, '{modality}'", many=name == public)
            of = columns[modality]
            contents[name] |= dict.fromkeys((of,) if isinstance(of, str) else of, content)
    return contents


def _uses(experiment: Experiment) -> Iterator[tuple[str, ModelSettings]]:
    """Sources, each with a model that reads it."""
    for group in experiment.clients.values():
        for model in group.models:
            yield group.source, model
            if group.also is not None and group.also.source is not None:
                yield group.also.source, model
    if experiment.server is not None:
        yield experiment.server.source, experiment.server.model
        if experiment.public is not None:
            yield experiment.public.source, experiment.server.model


def _content(view: View, where: str, *, many: bool) -> str:
    if view.takes:
        return "texts" if many and view.takes == "text" else view.takes
    raise ConfigError(
        f"traffic of {where}: what a view '{view.component_name()}' reads cannot be made up; measure a run, or the "
        "experiment with its data"
    )


def _classes(source: str, classes: Mapping[str, int]) -> int:
    if source not in classes:
        raise ConfigError(f"the number of classes of '{source}' is not known without its data: --classes {source}=N")
    return classes[source]
