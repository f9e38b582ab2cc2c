"""Splits made of Arrow tables: the common part of Parquet files, hub data sets, PhysioNet folders and scenes."""

from __future__ import annotations

import difflib
import hashlib
import re
import sys
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from polyfed.core.errors import DataError, nearest
from polyfed.core.settings import Settings
from polyfed.data import arrow
from polyfed.data.images import image_bytes
from polyfed.data.source import Column, Count, LeftOut, Source, Split, called


def label_column(
    values: pa.ChunkedArray, names: tuple[str, ...], stamp: str, where: str, codes: Sequence[int] = ()
) -> Column:
    """Checked class numbers: a wrong one would only fail in a loss, on a GPU without a message.

    ``codes`` are the values that stand for class numbers; empty: the values are class numbers.
    """
    dtype = values.type
    encoded = arrow.is_text(dtype) or bool(codes)
    if encoded:
        values = pc.index_in(values if codes else arrow.unless_blank(values), pa.array(codes or names, dtype))
        stamp = arrow.fingerprint_of(stamp, *names, *codes)
    elif pa.types.is_boolean(arrow.innermost(dtype)):
        numbers = pa.int8()
        while arrow.is_list(dtype):
            numbers, dtype = pa.list_(numbers), dtype.value_type
        values = values.cast(numbers)
    flat, nulls = values, values.null_count
    while arrow.is_list(flat.type):
        flat = pc.list_flatten(flat)
        nulls += flat.null_count
    bounds = pc.min_max(flat).as_py()
    outside = names and bounds["min"] is not None and (bounds["min"] < 0 or bounds["max"] >= len(names))
    if nulls or outside:
        raise _bad_label(values, len(names), where)
    return Column(values, stamp, where, encoded=encoded)


def _bad_label(values: pa.ChunkedArray, classes: int, where: str) -> DataError:
    """The error for the first label that is null or, if the number of classes is known, not a class."""

    def bad(entry: Any) -> list[Any]:
        if isinstance(entry, list):
            return [label for part in entry for label in bad(part)]
        return [entry] if entry is None or (classes and not 0 <= entry < classes) else []

    row, label = next((row, labels[0]) for row, entry in enumerate(values.to_pylist()) if (labels := bad(entry)))
    valid = f"in 0 to {classes - 1}" if classes else "an integer"
    can_leave_out = label is None and not arrow.is_list(values.type)
    remedy = f"mend or leave out the row{' (incomplete: leave_out), as polyfed prepare does' if can_leave_out else ''}"
    return DataError(f"{where}, row {row}: label {label} is not {valid}; {remedy}")


_Value = StrictBool | StrictInt | StrictStr
_Plain = bool | int | str
_USUAL = ("train", "validation", "test")  # splits that may be named even if a source lacks them
_KEYS = 2  # raise when the content of cache keys changes
_SPARSE = 10  # classes per class that occurs, above which labels are codes
_SHOWN = 20  # most values that an error lists: a column of ids has thousands


@dataclass(frozen=True)
class SplitTable:
    """One split as a table with one row per item, read column by column.

    Attributes:
        read: column -> all its values.
        count: returns the number of rows.
        schema: schema of the table; class names come from its Hugging Face metadata.
        where: path or name of the data as the user gave it, for messages and ids.
        split: name of the split.
        key: column -> text that changes whenever its values in this split, or the files that these name, may have; made
            of the content, or of the files and every setting that chooses rows.
        ids: column of strings or integers, unique; None makes ids ``<where>/<split>:<row>``, with the row's number in
            the complete table, whatever is selected.
        everywhere: column -> its values in all splits of the source; None: other splits cannot be read, so targets
            cannot be texts.
        filled: column -> True if it certainly has no null, without reading it.
        folder: folder of the files that rows may name; None: rows do not name files.
        recipe: identifies the settings of a generated table, on every machine alike; empty: stored data.
        sizes: column -> number of values in each row, for columns of which ``take`` reads some rows without the others.
        take: column -> its values in some rows.
        scope: where ids are unique; empty: everywhere.
    """

    read: Callable[[str], pa.ChunkedArray]
    count: Callable[[], int]
    schema: pa.Schema
    where: str
    split: str
    key: Callable[[str], str]
    ids: str | None = None
    everywhere: Callable[[str], pa.ChunkedArray] | None = None
    filled: Callable[[str], bool] = lambda column: False
    folder: Path | None = None
    recipe: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    take: Callable[[str, npt.NDArray[np.int64]], pa.ChunkedArray] = lambda column, rows: NotImplemented
    scope: str = ""

    @property
    def place(self) -> str:
        return f"{self.where}/{self.split}"

    @classmethod
    def of_parts(
        cls, data: Any, parts: Callable[[], Iterable[Any]], *, folder: Path, stamp: str | None = None, **about: Any
    ) -> SplitTable:
        """A split that is an Arrow table or a ``datasets.Dataset``, as are ``parts``, the splits of its source.

        ``stamp`` changes with the content of ``data`` except for named files; None: keys are digests of the content.
        """

        @cache
        def key(column: str) -> str:
            values = arrow.column_of(data, column)
            return arrow.content_key(values, folder) if stamp is None else stamp + arrow.named_files_key(values, folder)

        return cls(
            key=key,
            folder=folder,
            read=lambda column: arrow.column_of(data, column),
            count=lambda: len(data),
            schema=data.schema if isinstance(data, pa.Table) else data.features.arrow_schema,
            everywhere=lambda column: arrow.joined(arrow.column_of(part, column) for part in parts()),
            **about,
        )

    def type_of(self, column: str) -> pa.DataType:
        return self.schema.field(column).type

    def require(self, column: str, place: str) -> None:
        """Raise DataError about ``place`` if the column is missing."""
        if column not in self.schema.names:
            raise DataError(f"{place}: no column '{column}'; {nearest(column, self.schema.names)}")


class TableSource(Source):
    """A source whose splits are tables with one row per item, of which settings choose some."""

    where: dict[str, _Value | Annotated[list[_Value], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="column -> value, or list of values, that an item must have; other rows are left out",
    )
    first: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="split -> number of its first rows that are used; others are left out"
    )
    incomplete: Literal["refuse", "leave_out", "keep"] = Field(
        default="refuse",
        description="items without a modality of ``columns`` (null, or a blank text) or without a target: an error "
        "when they are read, left out, or kept if they have one modality and all targets",
    )
    keep_first: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="column of lists -> number of first entries kept of each list: {captions: 5}, as recalls on COCO "
        "use five captions per image",
    )
    matches: str | None = Field(
        default=None,
        description="column of texts or integers: items with equal values are right answers to each other; an item "
        "with a null or blank value only to itself",
    )

    @abstractmethod
    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The stored table of one split; arguments and errors are those of ``open``."""

    def rows(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The table of one split, stored or drawn."""
        return self.table(split, name=name, data_dir=data_dir)

    def has(self, split: str, name: str = "", data_dir: Path | None = None) -> bool:
        """True if the split is stored."""
        try:
            self.table(split, name=name, data_dir=data_dir)
        except DataError:
            return False
        return True

    def most_items(self, split: str, name: str) -> int | None:
        """See ``Source``."""
        return self.first.get(split)

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split; reads its schema, the ids, and the columns that choose its rows."""
        for other in sorted(self.first.keys() - {split, *_USUAL}):
            try:
                self.rows(other, name=name, data_dir=data_dir)
            except DataError as error:
                valid = f"valid are {', '.join(_USUAL)}, and others that it has ({error})"
                raise DataError(f"source '{name}', first.{other}: not a split of the source; {valid}") from error
        return split_of_table(self.rows(split, name=name, data_dir=data_dir), self, name)

    def account(self, *, name: str, data_dir: Path | None, used: Collection[str] = ()) -> tuple[Count, ...]:
        """See ``Source``; items of the usual splits, and columns."""
        counts, columns = [], dict[str, None]()
        for split in _USUAL:
            try:
                table = self.rows(split, name=name, data_dir=data_dir)
            except DataError:  # a missing split
                continue
            columns |= dict.fromkeys(table.schema.names)
            opened = split_of_table(table, self, name)
            counts += [opened.count] if opened.count else []
        named = {table.ids, self.matches, *self.targets.values(), *self.where, *self.split_columns, *used}
        for parts in self.columns.values():
            named |= {parts} if isinstance(parts, str) else {*parts}
        unused = [column for column in columns if column not in named]
        left_out = [LeftOut("without a role", len(unused), ", ".join(unused[:_SHOWN]))]
        return (*counts, Count.of("columns", len(columns), len(named & columns.keys()), left_out))

    @property
    def split_columns(self) -> tuple[str, ...]:
        """Columns that define the splits."""
        return ()


class Reading(Settings):
    """Reading of table cells."""

    fold_labels: bool = Field(
        default=False,
        description="class names that differ only in case, blanks, Unicode or number format are one class",
    )
    classes: dict[str, Annotated[tuple[StrictInt | StrictStr, ...], Field(min_length=2)]] = Field(
        default_factory=dict,
        description="target -> its classes as in the column, texts or integers, in order: equal for all sites, whose "
        "own data may lack some; other values are refused. Without an entry: the classes in the data",
    )


class StoredSource(TableSource):
    """A source of stored tables; missing splits may be drawn from ``train``."""

    fractions: dict[str, float | tuple[str, ...]] = Field(
        default_factory=dict,
        description="validation or test -> share of train that is drawn for it if the source lacks the split, the same "
        "rows on every machine; together -> columns whose equal values stay in one split, such as [patient_id], or "
        "[contents] for equal images, or rows",
    )
    reading: Reading = Field(default=Reading(), description="reading of cells")
    max_rows: int = Field(default=10_000_000, ge=1, description="most rows of a stored split")

    @property
    def shares(self) -> dict[str, float]:
        """Split -> share of train that is drawn for it."""
        return {split: share for split, share in self.fractions.items() if isinstance(share, float)}

    @property
    def together(self) -> tuple[str, ...]:
        """Columns whose equal values stay in one drawn split."""
        columns = self.fractions.get(_TOGETHER, ())
        return columns if isinstance(columns, tuple) else ()

    @property
    def split_columns(self) -> tuple[str, ...]:
        """See ``TableSource``."""
        return self.together

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        for key, value in self.fractions.items():
            if key not in ("validation", "test", _TOGETHER):
                raise ValueError(f"fractions: '{key}' cannot be drawn; valid: validation, test, together")
            if isinstance(value, tuple) != (key == _TOGETHER) or (isinstance(value, float) and not 0 <= value < 1):
                wanted = "a list of columns" if key == _TOGETHER else "a share of 0 to less than 1"
                raise ValueError(f"fractions.{key}: {value} is not {wanted}")
        if self.together and not any(self.shares.values()):
            raise ValueError("fractions.together has no effect without a share; leave it out, or give one")
        for target in self.reading.classes.keys() - self.targets.keys():
            raise ValueError(f"reading.classes.{target}: {nearest(target, self.targets)}; name it under targets too")
        if sum(self.shares.values()) >= 1:
            raise ValueError(f"fractions add up to {sum(self.shares.values()):g}; leave something for train")
        return self

    def rows(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """See ``TableSource``."""
        shares = {}
        if split in ("train", *self.shares):
            shares = {one: share for one, share in self.shares.items() if not self.has(one, name, data_dir)}
        stored = self.table("train" if split in shares else split, name=name, data_dir=data_dir)
        if (count := stored.count()) > self.max_rows:
            limit = f"the limit is {self.max_rows:,}; raise max_rows of '{name}'"
            raise DataError(f"{stored.place}: {count:,} rows, {limit}")
        if not shares or stored.split != "train":
            return stored
        for column in self.where:
            stored.require(column, f"{stored.place} (source '{name}', where)")
        fitting = _fitting(stored, self, arrow.class_names(stored.schema, stored.where))
        return _drawn(stored, split, shares, self.together, fitting)


_TOGETHER = "together"
CONTENTS = "contents"
"""Entry of ``together`` for items with equal images, or without images equal rows."""


def _drawn(
    table: SplitTable, split: str, shares: Mapping[str, float], together: Sequence[str], fitting: arrow.Mask
) -> SplitTable:
    """The rows of ``train`` drawn for a split, by a hash of ids, or without ids of all columns except files.

    They are the same on every machine; equal ids, equal contents and rows that ``together`` joins are in one split.
    Shares are of the rows that fit ``where``; other rows, which are left out anyway, stay in ``train``.
    """
    if table.ids is not None:
        table.require(table.ids, table.place)
    for column in together:
        if column != CONTENTS:
            table.require(column, f"{table.place} (together)")
    plain = [entry.name for entry in table.schema if not re.search("struct|binary", str(entry.type))]
    columns = plain if table.ids is None else [table.ids]
    rows = zip(*(table.read(column).to_pylist() for column in columns), strict=True)
    keys = ["\x1f".join("<NA>" if value is None else str(value) for value in row) for row in rows]
    keys = keys or [str(row) for row in range(table.count())]
    joining = [_contents(table) if column == CONTENTS else table.read(column).to_pylist() for column in together]
    keys = _groups([keys, *joining]) if together else keys
    drawn_from = [key for key, fits in zip(keys, fitting, strict=True) if fits]
    order = sorted(set(drawn_from), key=lambda key: hashlib.sha256(key.encode()).digest())
    # shares count items, and groups have several
    sizes = Counter(drawn_from) if together else Counter(order)
    parts = list[str]()
    for one, share in shares.items():
        wanted = round(share * sizes.total()) or bool(share)
        while wanted > 0 and len(parts) < len(order):
            wanted -= sizes[order[len(parts)]]
            parts.append(one)
    if order and len(parts) >= len(order):
        what = f"items that stay together in {len(order)} groups" if together else "items"
        remedy = f"too few to draw {' and '.join(shares)} from; add some, or set these shares to 0 (fractions)"
        raise DataError(f"'{table.where}' has {sizes.total()} {what}, {remedy}")
    split_of = dict.fromkeys(order, "train") | dict(zip(order, parts, strict=False))
    parts_of = [split_of[key] if fits else "train" for key, fits in zip(keys, fitting, strict=True)]
    return replace(_with_rows(table, np.array([part == split for part in parts_of])), split=split)


def _with_rows(table: SplitTable, rows: arrow.Mask) -> SplitTable:
    mask = pa.array(rows)
    return replace(
        table,
        read=lambda column: table.read(column).filter(mask),
        count=lambda: int(rows.sum()),
        key=lambda column: arrow.fingerprint_of(table.key(column), arrow.mask_key(rows)),
        sizes={},
    )


def _groups(columns: Sequence[Sequence[Any]]) -> list[str]:
    """One key per row; rows that share a value of a column, directly or through other rows, share the key."""
    parent = list(range(len(columns[0])))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for values in columns:
        first: dict[Any, int] = {}
        for row, value in enumerate(values):
            if value not in (None, ""):
                parent[root(row)] = root(first.setdefault(str(value), row))
    keys = dict[int, str]()
    for row, key in enumerate(columns[0]):  # the least of all keys, whatever the order of rows
        keys[root(row)] = min(key, keys.get(root(row), key))
    return [keys[root(row)] for row in range(len(parent))]


def value_digest(value: Any, folder: Path | None) -> str:
    """Hexadecimal digest of an image's or recording's bytes, or of any other value.

    Raises:
        OSError, ValueError: as for ``image_bytes``.
    """
    is_stored = isinstance(value, bytes) or (isinstance(value, dict) and "path" in value)
    return hashlib.sha256(image_bytes(value, folder) if is_stored else repr(value).encode()).hexdigest()


_digests: dict[str, list[str]] = {}  # contents of a few tables, which every participant opens


def _contents(table: SplitTable) -> list[str]:
    """Digest of the image or recording of each row, or without files of the complete row."""
    files = [entry.name for entry in table.schema if arrow.is_file(entry.type)]
    columns = files[:1] or table.schema.names
    stamp = arrow.fingerprint_of(*map(table.key, columns))
    if stamp not in _digests:
        rows = list(zip(*(table.read(column).to_pylist() for column in columns), strict=True))
        try:
            digests = [value_digest(row[0] if files else row, table.folder) for row in rows]
        except (OSError, ValueError) as error:
            raise DataError(f"{table.place} (together: {CONTENTS}): {error}; mend or leave out the row") from error
        if len(_digests) > 8:
            _digests.clear()
        _digests[stamp] = digests
    return _digests[stamp]


def split_of_table(table: SplitTable, source: TableSource, name: str) -> Split:
    """The rows of a table that are items, with the columns and targets that a source names.

    A target is a column of integers or booleans, of (nested) lists of these, or of texts, whose classes are the
    distinct texts of all splits in alphabetical order. Integers that are codes of classes, such as 3, 40 and 2000000,
    are numbered in order, and name their classes.

    Args:
        table: all rows.
        source: settings that choose among them.
        name: Name of the source in the configuration.

    Raises:
        DataError: a named column is missing or of the wrong type, an id is missing or not unique, or no row remains.
    """
    table = with_folded(_with_structs(table, source, name), source)
    _require_columns(table, source, name)
    names = arrow.class_names(table.schema, table.where)
    codes = {column: _codes(table, column, names) for column in source.targets.values()}
    agreed = _agreed_classes(table, source, names)
    codes |= {column: [one for one in classes if isinstance(one, int)] for column, classes in agreed.items()}
    names |= {column: tuple(map(str, numbers)) for column, numbers in codes.items() if numbers}
    names |= {column: tuple(map(str, classes)) for column, classes in agreed.items()}
    classes = {
        target: names[column] if column in agreed else _classes(table, source, target, names)
        for target, column in source.targets.items()
    }
    # a column is read as labels if a target names it, else unchanged
    names_of_labels = {column: classes[target] for target, column in source.targets.items()}
    rows, left_out, counted = _items(table, source, names)
    with_gaps = set(source.column_names.values()) if source.incomplete == "keep" else set[str]()

    def kept(column: str) -> pa.ChunkedArray:
        values = _entries(table, source, column)
        return values if rows is None else values.filter(pa.array(rows))

    def take(column: str, chosen: npt.NDArray[np.int64]) -> pa.ChunkedArray:
        return _entries(table, source, column, chosen if rows is None else np.flatnonzero(rows)[chosen])

    @cache  # labels are small, and every participant needs them
    def labels(column: str, stamp: str, here: str) -> Column:
        return label_column(kept(column), names_of_labels[column], stamp, here, codes[column])

    def read(column: str) -> Column:
        table.require(column, table.place)
        here = f"{table.place}, {'' if rows is None else 'kept items, '}column '{column}'"
        # the same rows have the same fingerprint, whichever settings chose them
        choice = () if rows is None else (arrow.mask_key(rows),)
        parts = [part for part in _parts(source).get(column, (column,)) if part in source.keep_first]
        choice = (*choice, *(f"first {source.keep_first[part]} of {part}" for part in parts))
        stamp = arrow.fingerprint_of(_KEYS, table.key(column), table.split, column, *choice)
        if column in names_of_labels:
            return labels(column, stamp, here)
        recipe = table.recipe and arrow.fingerprint_of(table.recipe, column, *choice)
        nested = arrow.is_list(table.type_of(column))
        gaps = column in with_gaps and not _is_known_full(table, column)
        size = min(table.sizes.get(column, 0), source.keep_first.get(column, sys.maxsize))
        taken = partial(take, column) if size else None
        lengths = np.full(counted.read, size) if size else None
        return Column(lambda: kept(column), stamp, here, nested, False, table.folder, recipe, gaps, taken, lengths)

    return Split(
        source=name,
        name=table.split,
        ids=_ids(table, rows, kept),
        columns=source.column_names,
        targets=dict(source.targets),
        classes={target: names for target, names in classes.items() if names},
        read=read,
        left_out=left_out,
        count=counted,
        scope=table.scope,
        matches=source.matches,
    )


def _parts(source: TableSource) -> dict[str, tuple[str, ...]]:
    """Name of columns in brackets -> these columns."""
    return {called(parts): parts for parts in source.columns.values() if not isinstance(parts, str)}


def folded(name: str) -> str:
    """A name without case, surplus blanks and Unicode form; a number by its value."""
    plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    return f"{float(plain):g}" if re.fullmatch(r"[-+]?\d+(\.\d*)?", plain) else plain


def spellings(names: Iterable[str | None]) -> dict[str, list[str]]:
    """Folded name -> its spellings, the most frequent first."""
    counts = Counter(name for name in names if name is not None and name.strip())
    of_name: dict[str, list[str]] = {}
    for name, _ in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        of_name.setdefault(folded(name), []).append(name)
    return of_name


def with_folded(table: SplitTable, source: TableSource) -> SplitTable:
    """The table with one spelling of each class, if ``reading.fold_labels`` is set."""
    everywhere = table.everywhere
    if not isinstance(source, StoredSource) or not source.reading.fold_labels or everywhere is None:
        return table
    agreed = {source.targets[target]: classes for target, classes in source.reading.classes.items()}

    def usual(column: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
        if column not in source.targets.values() or not arrow.is_text(values.type):
            return values
        known = spellings(everywhere(column).to_pylist())
        known |= {folded(name): [name] for name in map(str, agreed.get(column, ()))}
        names = [name and known.get(folded(name), [name])[0] for name in values.to_pylist()]
        return pa.chunked_array([pa.array(names, values.type)])

    return replace(
        table,
        read=lambda column: usual(column, table.read(column)),
        everywhere=lambda column: usual(column, everywhere(column)),
        key=lambda column: arrow.fingerprint_of(table.key(column), "folded"),
    )


def _with_structs(table: SplitTable, source: TableSource, name: str) -> SplitTable:
    """The table with a column of structs for each modality of several columns.

    Raises:
        DataError: one of these is missing, or a target, which models may not see.
    """
    structs = _parts(source)
    for modality, column in source.column_names.items():
        key = f"source '{name}', columns.{modality}"
        for part in structs.get(column, ()):
            table.require(part, f"{table.place} ({key})")
            if part in source.targets.values():
                raise DataError(f"{key}: column '{part}' is a target; leave it out")

    def read(column: str) -> pa.ChunkedArray:
        if column not in structs:
            return table.read(column)
        values = [_entries(table, source, part).combine_chunks() for part in structs[column]]
        return pa.chunked_array([pa.StructArray.from_arrays(values, names=structs[column])])

    def key_of(column: str) -> str:
        own = ((part, table.key(part)) for part in structs.get(column, ()))
        return arrow.fingerprint_of(*own) if column in structs else table.key(column)

    schema = table.schema
    for column, parts in structs.items():
        schema = schema.append(pa.field(column, pa.struct([(part, table.type_of(part)) for part in parts])))
    return replace(
        table,
        read=read,
        schema=schema,
        filled=lambda column: any(map(table.filled, structs.get(column, (column,)))),
        key=key_of,
    )


def _require_columns(table: SplitTable, source: TableSource, name: str) -> None:
    uses = {f"columns.{modality}": column for modality, column in source.column_names.items()}
    uses |= {f"targets.{target}": column for target, column in source.targets.items()}
    chosen = [("id", table.ids), *uses.items(), *(("where", column) for column in source.where)]
    chosen += [("keep_first", column) for column in source.keep_first]
    for use, column in [*chosen, ("matches", source.matches)]:
        if column is not None:
            table.require(column, f"{table.place} (source '{name}', {use})")
    for column in source.keep_first:
        if not arrow.is_list(dtype := table.type_of(column)):
            raise DataError(f"{table.place}, keep_first: column '{column}' holds {dtype}; name one of lists")
    column = source.matches
    if column is not None and not (arrow.is_text(dtype := table.type_of(column)) or pa.types.is_integer(dtype)):
        raise DataError(f"{table.place}, matches: column '{column}' holds {dtype}; name one of texts or integers")


def _entries(
    table: SplitTable, source: TableSource, column: str, rows: npt.NDArray[np.int64] | None = None
) -> pa.ChunkedArray:
    """A column of some rows, by default of all, with the kept entries of its lists."""
    values, entries = table.read(column) if rows is None else table.take(column, rows), source.keep_first.get(column)
    return values if entries is None else pc.list_slice(values, 0, entries)


def _items(
    table: SplitTable, source: TableSource, names: Mapping[str, Sequence[str]]
) -> tuple[arrow.Mask | None, dict[str, int], Count]:
    """Mask of the rows that are items (None: all), column -> number of fitting rows that lack it, and the count."""
    lenient, first = source.incomplete != "refuse", source.first.get(table.split)
    unit, total = f"items ({table.split})", table.count()
    if not source.where and not lenient and first is None:
        return None, {}, Count(unit, total, total)
    fitting = _fitting(table, source, names)
    reasons = [LeftOut("do not match `where`", total - int(fitting.sum()))]
    fitting &= np.arange(len(fitting)) < (first or len(fitting))
    reasons += [LeftOut(f"after the first {first}", total - int(fitting.sum()) - reasons[0].count)]
    if not fitting.any():
        raise DataError(f"{table.place}: none of the items that fit where is among the first {first}; raise first")
    rows, left_out = _complete(table, source, fitting) if lenient else (fitting, {})
    reasons += [LeftOut(f"without {' or '.join(left_out)}", int(fitting.sum() - rows.sum()))]
    return None if rows.all() else rows, left_out, Count.of(unit, total, int(rows.sum()), reasons)


def _fitting(table: SplitTable, source: TableSource, names: Mapping[str, Sequence[str]]) -> arrow.Mask:
    """Mask of the rows that fit ``where``."""
    fitting: arrow.Mask = np.ones(table.count(), np.bool_)
    wanted = {column: value if isinstance(value, list) else [value] for column, value in source.where.items()}
    for column, values in wanted.items():
        fitting &= _having(table, column, values, names.get(column, ()))
    if not fitting.any():
        asked = ", ".join(f"{column}: {' or '.join(map(repr, values))}" for column, values in wanted.items())
        raise DataError(f"{table.place}: none of {len(fitting)} items fits where {{{asked}}}; ask for less")
    return fitting


def fitting_rows(table: SplitTable, source: TableSource) -> SplitTable:
    """The rows of a table that fit ``where``."""
    names = arrow.class_names(table.schema, table.where)
    return _with_rows(table, _fitting(table, source, names)) if source.where else table


def _complete(table: SplitTable, source: TableSource, fitting: arrow.Mask) -> tuple[arrow.Mask, dict[str, int]]:
    """Mask of the rows that are complete, or complete enough, and column -> number of other rows that lack it."""
    keeps = set(source.column_names.values()) if source.incomplete == "keep" else set[str]()
    # a list of labels may be empty
    single = [column for column in source.targets.values() if not arrow.is_list(table.type_of(column))]
    gaps, gone, lacks_all = dict[str, arrow.Mask](), np.zeros_like(fitting), fitting.copy()
    for column in dict.fromkeys((*source.column_names.values(), *single)):
        gap = np.zeros_like(fitting)
        if not _is_known_full(table, column):
            gap = fitting & (arrow.empty if column in keeps else arrow.lacking)(_entries(table, source, column))
        gaps[column] = gap
        if column in keeps:  # an item with one of these is kept
            lacks_all &= gap
        else:
            gone |= gap
    gone |= lacks_all if keeps else False
    left_out = {column: int((gap & gone).sum()) for column, gap in gaps.items() if (gap & gone).any()}
    rows = fitting & ~gone
    if not rows.any():
        lacks = ", ".join(f"'{column}' ({count})" for column, count in left_out.items())
        what = f"all {int(fitting.sum())} items are incomplete, they lack {lacks}"
        raise DataError(f"{table.place}: {what}; name other columns")
    return rows, left_out


def _is_known_full(table: SplitTable, column: str) -> bool:
    """True if a column of files certainly has no gap, without reading it."""
    dtype = table.type_of(column)
    return not arrow.is_text(dtype) and not arrow.is_list(dtype) and table.filled(column)


_FITS: Mapping[type, tuple[Callable[[pa.DataType], bool], str]] = {
    bool: (pa.types.is_boolean, "give true or false"),
    int: (pa.types.is_integer, "give an integer (or, where the column has class names, one of these)"),
    str: (arrow.is_text, "give a text (in quotes if it looks like a number)"),
}
"""Type of a value in settings -> test of columns that may hold it, and the remedy for others."""


def _having(table: SplitTable, column: str, wanted: Sequence[_Plain], names: Sequence[str]) -> arrow.Mask:
    """Mask of the rows with one of the values; a class may be given by its name."""
    place = f"{table.place}, where.{column}"
    stored = [_stored(value, table.type_of(column), names, place) for value in wanted]

    def read(values_of: Callable[[str], pa.ChunkedArray]) -> pa.ChunkedArray:
        values = values_of(column)  # shards and splits may hold a column as integers of different width
        return values.cast(pa.int64()) if pa.types.is_integer(values.type) else values

    values = read(table.read)
    present = set(values.unique().to_pylist())
    if table.everywhere is not None and not present.issuperset(stored):
        # a value may be missing in this split alone
        present |= set(read(table.everywhere).unique().to_pylist())
    for value, number in zip(wanted, stored, strict=True):
        if number not in present:
            words = sorted(str(names[entry] if names else entry) for entry in present - {None})
            close = difflib.get_close_matches(str(value), words, n=_SHOWN) or words[:_SHOWN]
            hint = nearest(str(value), words if len(words) <= _SHOWN else close)
            raise DataError(f"{place}: no item has {value!r}; {hint}")
    rows: arrow.Mask = pc.is_in(values, value_set=pa.array(stored, values.type)).to_numpy().astype(np.bool_)
    return rows


def _stored(value: _Plain, dtype: pa.DataType, names: Sequence[str], place: str) -> _Plain:
    """A value as it is stored in a column: the number of a class that is given by its name."""
    if _FITS[type(value)][0](dtype):
        return value
    if isinstance(value, str) and names and pa.types.is_integer(dtype):
        if value not in names:
            raise DataError(f"{place}: no class '{value}'; {nearest(value, names)}")
        return names.index(value)
    given = str(value).lower() if isinstance(value, bool) else repr(value)
    remedies = [remedy for fits, remedy in _FITS.values() if fits(dtype)]
    remedy = (*remedies, "name a column of booleans, integers or texts")[0]
    raise DataError(f"{place}: the column holds {dtype}, which {given} is not; {remedy}")


def _classes(
    table: SplitTable, source: TableSource, target: str, names: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Class names of a target in label order; empty if only its numbers are known."""
    column = source.targets[target]
    dtype = table.type_of(column)
    if pa.types.is_boolean(arrow.innermost(dtype)):
        return "false", "true"
    if pa.types.is_integer(arrow.innermost(dtype)):
        return names.get(column, ())
    place = f"{table.place}, target '{target}', column '{column}'"
    if not arrow.is_text(dtype) or table.everywhere is None:
        texts = "" if table.everywhere is None else ", or one text an item,"
        raise DataError(f"{place}: a target needs integers or lists of integers{texts} not {dtype}; use class numbers")
    if column in source.column_names.values():
        raise DataError(f"{place}: its texts are a modality already; a target needs a column of its own")
    return tuple(sorted(arrow.unless_blank(table.everywhere(column)).unique().drop_null().to_pylist()))


def _agreed_classes(
    table: SplitTable, source: TableSource, names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int | str, ...]]:
    """Column -> its classes from ``reading.classes``.

    Raises:
        DataError: the column has another value, or class names of its own.
    """
    agreed = {}
    for target, classes in source.reading.classes.items() if isinstance(source, StoredSource) else ():
        column, key = source.targets[target], f"reading.classes.{target}"
        dtype, place = table.type_of(column), f"{table.place}, column '{column}'"
        if column in names or not (arrow.is_text(dtype) or pa.types.is_integer(dtype)):
            raise DataError(f"{place}: {key} is for texts and whole numbers without names, not {dtype}; leave it out")
        values = (table.everywhere or table.read)(column)
        there = (arrow.unless_blank(values) if arrow.is_text(dtype) else values).unique().drop_null().to_pylist()
        if unknown := [value for value in there if value not in classes]:
            shown = ", ".join(map(repr, classes[:_SHOWN]))
            raise DataError(f"{place}: {unknown[0]!r} is not among {key}, {shown}; add it there, or mend the data")
        agreed[column] = classes
    return agreed


def _codes(table: SplitTable, column: str, names: Mapping[str, Sequence[str]]) -> list[int]:
    """Integers that are codes of classes, in order; empty if they are class numbers.

    Codes are 1 to k, or so sparse that less than a tenth of the classes up to the largest would occur in any split.
    """
    if column in names or table.everywhere is None or not pa.types.is_integer(table.type_of(column)):
        return []
    numbers = sorted(table.everywhere(column).unique().drop_null().to_pylist())
    if len(numbers) < 2 or numbers[0] < 0:
        return []
    from_one = numbers[0] == 1 and numbers[-1] == len(numbers)
    return numbers if from_one or numbers[-1] + 1 > _SPARSE * len(numbers) else []


def _ids(table: SplitTable, rows: arrow.Mask | None, read: Callable[[str], pa.ChunkedArray]) -> tuple[str, ...]:
    if table.ids is None:
        numbers = range(table.count()) if rows is None else np.flatnonzero(rows).tolist()
        return tuple(f"{table.place}:{row}" for row in numbers)
    values, what = read(table.ids).to_pylist(), f"{table.place}, column '{table.ids}'"
    if None in values:
        raise DataError(f"{what}, row {values.index(None)}: no id; every item needs one")
    ids = tuple(map(str, values))
    if len(set(ids)) < len(ids):
        twice, count = Counter(ids).most_common(1)[0]
        remedy = "an item is one row (several captions go into a list), or leave `id` out"
        raise DataError(f"{what}: id '{twice}' occurs {count} times; {remedy}")
    return ids
