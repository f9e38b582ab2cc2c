"""A first experiment on one's own data, as a commented YAML file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.data.roles import ColumnRoles
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.parquet import Parquet
from polyfed.data.tables import SplitTable, TableSource
from polyfed.runs.starter_encoders import FROM_SCRATCH, StarterEncoders

if TYPE_CHECKING:
    from jinja2 import Template

DataKind = Literal["pairs", "pictures", "texts"]

_NEEDS: Mapping[DataKind, tuple[str, ...]] = {
    "pairs": ("image", "text"),
    "pictures": ("image", "label"),
    "texts": ("text", "label"),
}
_HOLDS: Mapping[DataKind, str] = {
    "pairs": "clients with pictures and captions",
    "pictures": "clients with labelled pictures",
    "texts": "clients with labelled texts",
}
_WITH_PAIRS: Mapping[str, str] = {
    "change_distillation": """\
# The server learns what its clients' networks learnt about the public pairs (docs: change distillation).
algorithm:
  name: change_distillation
  teacher: {groups: [pairs]}
  LEARNING""",
    "creamfl": """\
# Representations of the public pairs, weighted by how well they tell pairs apart (docs: CreamFL).
algorithm:
  name: creamfl
  local_epochs: 1
  contrast: {inter: {tau: 0.1}}
  teacher: {weights: {name: gca, tau: 0.05}}""",
}
# frozen networks end in one layer, whose changes can be averaged; networks from scratch move too far for that
_FROM_SCRATCH = """targets: absolute
  digest: {by: gradient}
  warmup_rounds: WARMUP  # of the server alone
  local_epochs: 2  # passes of a client over its own data a round
  distiller: {epochs: 8, weight: 10}  # passes of the server over the public pairs a round"""
_PRETRAINED = """local_epochs: 6  # passes of a client over its own data a round
  distiller: {epochs: 4}  # passes of the server over the public pairs a round"""
_AVERAGES = """\
# Weights are averaged by type of client, so that all of a type have one architecture (docs: weight exchange).
algorithm: {name: fedavg, local_epochs: 1}"""
STARTERS = (*_WITH_PAIRS, "fedavg")
"""Methods that a first experiment may have; with pairs the first, else the last."""

_PUBLIC = 1000  # most public pairs
_BATCH = 64


@dataclass(frozen=True)
class StarterSource:
    """A data set of the user's.

    Attributes:
        kind: what it is for.
        reader: the source that reads it, folder or parquet.
        path: absolute.
        roles: its columns.
        items: in its training split.
        id: column that identifies an item, if one is known.
    """

    kind: DataKind
    reader: str
    path: str
    roles: ColumnRoles
    items: int
    id: str | None

    @classmethod
    def of(cls, kind: DataKind, path: Path) -> StarterSource:
        """Looks into a folder of Parquet files, or of pictures or texts as they are, or into one file.

        Raises:
            DataError: it cannot be read, or lacks what the kind needs.
        """
        whole = str(path.expanduser().absolute())
        is_parquet = path.is_dir() and any(path.glob("*.parquet"))
        source: TableSource = Parquet(path=whole) if is_parquet else Folder(path=whole)
        table = source.table("train", name=kind, data_dir=None)
        roles = ColumnRoles.of(_columns(table))
        for part in _NEEDS[kind]:
            if getattr(roles, part) is None:
                names = ", ".join(table.schema.names)
                raise DataError(f"--{kind} {path}: there is no column with {_WORDS[part]}, only {names}")
        roles = ColumnRoles(*(getattr(roles, part) if part in _NEEDS[kind] else None for part in _WORDS))
        known = table.ids or ("file_name" if "file_name" in table.schema.names else None)
        return cls(kind, source.component_name(), whole, roles, table.count(), known if is_parquet else None)

    @property
    def holds(self) -> str:
        """Who has it, in words."""
        return _HOLDS[self.kind]


_WORDS = {"image": "pictures", "text": "texts", "label": "classes"}


def starter_text(
    name: str,
    file: str,
    paths: Mapping[DataKind, Path],
    *,
    method: str | None = None,
    clients: int = 3,
    rounds: int = 10,
    encoders: StarterEncoders = FROM_SCRATCH,
) -> str:
    """The YAML of an experiment in which ``clients`` clients of each kind of data train with a server.

    Args:
        name: of the experiment.
        file: what the file is called, for its comments.
        paths: kind of data -> folder or file.
        method: one of ``STARTERS``; None: the one that fits the data.
        clients: of each kind.
        rounds: of the run.
        encoders: pretrained networks.

    Raises:
        ConfigError: no data, or the method needs others.
        DataError: data that cannot be read, or are not of their kind.
    """
    chosen = _chosen(method, paths)
    sources = [StarterSource.of(kind, paths[kind]) for kind in _NEEDS if kind in paths]
    has_pairs = "pairs" in paths
    tokenizer = "wordpiece" if has_pairs else "hashing"
    learning = _FROM_SCRATCH if encoders.missing(modalities_of(paths)) else _PRETRAINED
    algorithm = _WITH_PAIRS.get(chosen, _AVERAGES).replace("LEARNING", learning)

    def lines(kind: DataKind, large: bool) -> list[str]:
        return [encoders.line(part, large=large, tokenizer=tokenizer) for part in _NEEDS[kind] if part != "label"]

    text: str = _template().render(
        name=name,
        file=file,
        sources=sources,
        public=min(_PUBLIC, sources[0].items // 5) if has_pairs else None,
        clients=clients,
        rounds=rounds,
        averages=chosen not in _WITH_PAIRS,
        algorithm=algorithm.replace("WARMUP", str(int(rounds > 1))),
        encoders=lines,
        weights=encoders.weights if encoders.names else None,
        rate=0.002 if encoders.missing(modalities_of(paths)) else 0.001,
        batch=max(2, min(_BATCH, min(source.items for source in sources) // (4 * clients))),
    )
    return text


def modalities_of(paths: Mapping[DataKind, Path]) -> list[str]:
    """What encoders read of such data."""
    needed = [part for kind in paths for part in _NEEDS[kind] if part != "label"]
    return list(dict.fromkeys(needed))


def _chosen(method: str | None, paths: Mapping[DataKind, Path]) -> str:
    if not paths:
        raise ConfigError("there are no data; give --pairs, --pictures or --texts")
    if method is not None and method not in STARTERS:
        raise ConfigError(f"--method {method}: not among {', '.join(STARTERS)}; {nearest(method, STARTERS)}")
    if method in _WITH_PAIRS and "pairs" not in paths:
        raise ConfigError(f"--method {method}: needs pictures with captions, of which some are public; give --pairs")
    return method or (STARTERS[0] if "pairs" in paths else STARTERS[-1])


def _columns(table: SplitTable) -> pa.Table:
    """Columns with their types; values of texts alone, which tell what they are for."""
    columns = {}
    for entry in table.schema:
        is_read = pa.types.is_string(entry.type) or pa.types.is_large_string(entry.type)
        columns[entry.name] = table.read(entry.name) if is_read else pa.nulls(table.count(), entry.type)
    return pa.table(columns)


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    text = resources.files("polyfed.runs").joinpath("starter.yaml.j2").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)
