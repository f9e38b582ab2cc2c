"""Splits made of Arrow tables: what Parquet files, hub data sets and generated tables have in common."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polyfed.core.errors import DataError, nearest
from polyfed.core.untrusted import file_json
from polyfed.data.selection import ColumnTable, Kept, kept_rows
from polyfed.data.source import Column, Selection, Split, is_text
from polyfed.data.source import is_list as is_list


class LazyColumn(Column):
    """A column whose values are read at first use: what is in a cache is never read again.

    Args:
        values: the values, or a call that reads them.
        fingerprint: see Column.
        where: see Column.
        nested: whether an item holds a list of values; None reads it off the values.
        encoded: see Column.
        folder: see Column.
        recipe: see Column.
    """

    def __init__(
        self,
        values: pa.ChunkedArray | Callable[[], pa.ChunkedArray],
        fingerprint: str,
        where: str,
        nested: bool | None = None,
        encoded: bool = False,
        folder: Path | None = None,
        recipe: str = "",
    ) -> None:
        # the base class is frozen, and its `values` is a property here
        vars(self).update(fingerprint=fingerprint, where=where, encoded=encoded, folder=folder, recipe=recipe)
        vars(self).update(_held=values, _nested=nested)

    @property
    def values(self) -> pa.ChunkedArray:
        """The values, read once."""
        held = vars(self)
        if callable(held["_held"]):
            held["_held"] = held["_held"]()
        return held["_held"]

    @property
    def nested(self) -> bool:
        """Whether an item holds a list of values."""
        known: bool | None = vars(self)["_nested"]
        return super().nested if known is None else known


def split_of_table(
    read: Callable[[list[str]], pa.Table],
    schema: pa.Schema,
    *,
    source: str,
    split: str,
    ids_column: str | None,
    columns: Mapping[str, str],
    targets: Mapping[str, str],
    fingerprint: str,
    where: str,
    selection: Selection | None = None,
    everywhere: Callable[[str], pa.ChunkedArray] | None = None,
    filled: Callable[[str], bool] | None = None,
    depends: Mapping[str, str] | None = None,
    folder: Path | None = None,
    recipe: str = "",
) -> Split:
    """A split over a table that can be read column by column.

    Args:
        read: names of columns -> table with just these; no names -> a table that only has its number of rows.
        schema: schema of the table; class names come from its Hugging Face metadata.
        source: name of the source in the configuration.
        split: name of the split.
        ids_column: column of strings or integers, unique; None makes ids ``<where>/<split>:<row>``, with the row's
            number in the whole table, whatever is selected.
        columns: modality -> column name.
        targets: target name -> column name; integers or booleans, (nested) lists of these, or texts, whose classes
            are the different texts of all splits in alphabetical order.
        fingerprint: changes whenever the content may have changed.
        where: path or name of the data as the user gave it, for messages and ids.
        selection: which rows are items; by default all.
        everywhere: column -> its values in all splits of the source; without it no target can be texts.
        filled: whether a column is known, without reading it, to have no null.
        depends: column -> what else its content changes with, besides ``fingerprint``.
        folder: folder in which files lie that rows may name; None: they name none.
        recipe: identifies what the table is generated from, on every machine alike; empty: it is not generated.

    Raises:
        DataError: a named column is missing or of the wrong type, an id is missing or not unique, or no row is left.
    """
    selection = selection or Selection()
    table = ColumnTable(read, schema, class_names(schema, where), f"{where}/{split}", everywhere, filled)
    for use, column in _uses(ids_column, columns, targets, selection):
        _require(schema, column, f"{table.place} (source '{source}', {use})")
    _require_comparable(table, selection.matches)
    classes = {target: _classes(table, target, column, columns) for target, column in targets.items()}
    names = {column: classes[target] for target, column in targets.items()}
    kept = kept_rows(table, selection, columns.values(), targets.values())

    def open_column(name: str) -> Column:
        _require(schema, name, table.place)
        here = f"{table.place}, {'' if kept.rows is None else 'kept items, '}column '{name}'"
        stamp = fingerprint_of(fingerprint, split, name, *kept.stamp(), *_extra(name, depends))
        if name in names:
            return _label_column(kept.of(table.column(name)), names[name], stamp, here)
        made_of = recipe and fingerprint_of(recipe, name, *kept.stamp())
        nested = is_list(table.kind(name))
        return LazyColumn(lambda: kept.of(table.column(name)), stamp, here, nested, folder=folder, recipe=made_of)

    return Split(
        source,
        split,
        _ids(table, ids_column, kept),
        dict(columns),
        dict(targets),
        {target: found for target, found in classes.items() if found},
        open_column,
        kept.left_out,
        selection.matches,
    )


def innermost(kind: pa.DataType) -> pa.DataType:
    """Type of the values of lists, of lists of lists, ...; that of anything else itself."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def fingerprint_of(*parts: object) -> str:
    """16 hexadecimal digits that depend on every part and on their order."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:16]


def fingerprint_of_files(files: Sequence[Path]) -> str:
    """Changes when a file is another one, or was written to."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return fingerprint_of(*(part for file, stat in stats for part in (file, stat.st_size, stat.st_mtime_ns)))


def flat_values(column: Column) -> pa.ChunkedArray:
    """The values of a column, those of a nested column one after the other in item order.

    Raises:
        DataError: a value, or a list of values, is null; the message names its row.
    """
    values = column.values
    if values.null_count:
        row = pc.index(values.is_null(), True).as_py()
        raise DataError(f"{column.where}, row {row}: no value; fill it or leave out the row (incomplete: leave_out)")
    if not column.nested:
        return values
    flat = pc.list_flatten(values)
    if flat.null_count:
        place = place_of(column, pc.index(flat.is_null(), True).as_py())
        raise DataError(f"{place}: no value; fill it or leave it out of the list")
    return flat


def place_of(column: Column, row: int) -> str:
    """Where value ``row`` of the flattened column stands, for error messages."""
    if not column.nested:
        return f"{column.where}, row {row}"
    ends = np.cumsum(pc.list_value_length(column.values).to_numpy())
    item = int(np.searchsorted(ends, row, side="right"))
    entry = row - (int(ends[item - 1]) if item else 0)
    return f"{column.where}, row {item}, entry {entry}"


def class_names(schema: pa.Schema, where: str = "table") -> dict[str, tuple[str, ...]]:
    """Column name -> class names in label order, from the Hugging Face metadata (ClassLabel features).

    Raises:
        DataError: the metadata of the table, which is called ``where``, are not readable.
    """
    raw = (schema.metadata or {}).get(b"huggingface")
    if raw is None:
        return {}
    try:
        features = file_json(raw).get("info", {}).get("features", {})
        found = {column: _labels_of(feature) for column, feature in features.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{where}: metadata 'huggingface', with names of classes, cannot be read: {error}") from error
    return {column: tuple(names) for column, names in found.items() if names}


def _labels_of(feature: Any) -> Sequence[str]:
    if isinstance(feature, list):
        return _labels_of(feature[0]) if feature else ()
    if not isinstance(feature, dict):
        return ()
    if feature.get("_type") == "ClassLabel":
        return feature.get("names") or ()
    return _labels_of(feature.get("feature"))


def _uses(
    ids_column: str | None, columns: Mapping[str, str], targets: Mapping[str, str], selection: Selection
) -> Iterator[tuple[str, str]]:
    if ids_column is not None:
        yield "id", ids_column
    for modality, column in columns.items():
        yield f"columns.{modality}", column
    for target, column in targets.items():
        yield f"targets.{target}", column
    for column in selection.where:
        yield "where", column
    if selection.matches is not None:
        yield "matches", selection.matches


def _require(schema: pa.Schema, column: str, place: str) -> None:
    if column not in schema.names:
        raise DataError(f"{place}: no column '{column}'; {nearest(column, schema.names)}")


def _require_comparable(table: ColumnTable, matches: str | None) -> None:
    if matches is None:
        return
    kind = table.kind(matches)
    if not (is_text(kind) or pa.types.is_integer(kind)):
        raise DataError(f"{table.place}, matches: column '{matches}' holds {kind}; name one of texts or integers")


def _extra(name: str, depends: Mapping[str, str] | None) -> tuple[str, ...]:
    return (depends[name],) if depends and name in depends else ()


def _classes(table: ColumnTable, target: str, column: str, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Class names of a target in label order; none if only its numbers are known."""
    kind = table.kind(column)
    inner = innermost(kind)
    place = f"{table.place}, target '{target}', column '{column}'"
    if pa.types.is_boolean(inner):
        return "false", "true"
    if pa.types.is_integer(inner):
        return table.names.get(column, ())
    if not is_text(kind) or table.everywhere is None:
        texts = "" if table.everywhere is None else ", or one text an item,"
        raise DataError(f"{place}: a target needs integers or lists of integers{texts} not {kind}; use class numbers")
    if column in columns.values():
        raise DataError(f"{place}: its texts are a modality already; a target needs a column of its own")
    found = _texts(table.everywhere(column)).unique().drop_null()
    return tuple(sorted(found.to_pylist()))


def _texts(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The texts, null where they are blank."""
    blank = pc.equal(pc.utf8_trim_whitespace(values), "")
    return pc.if_else(blank, pa.scalar(None, values.type), values)


def _label_column(values: pa.ChunkedArray, names: tuple[str, ...], stamp: str, where: str) -> Column:
    kind = values.type
    if is_text(kind):
        numbers = pc.index_in(_texts(values), value_set=pa.array(names, kind))
        return Column(_checked_labels(numbers, len(names), where), fingerprint_of(stamp, *names), where, encoded=True)
    if pa.types.is_boolean(innermost(kind)):
        values = values.cast(_numbers(kind))
    return Column(_checked_labels(values, len(names), where), stamp, where)


def _numbers(kind: pa.DataType) -> pa.DataType:
    """The type of booleans, or of lists of booleans, as numbers."""
    return pa.list_(_numbers(kind.value_type)) if is_list(kind) else pa.int8()


def _checked_labels(values: pa.ChunkedArray, classes: int, where: str) -> pa.ChunkedArray:
    """The values, if none is null and all are below the number of classes (0: not known)."""
    flat, nulls = values, values.null_count
    while is_list(flat.type):
        flat = pc.list_flatten(flat)
        nulls += flat.null_count
    bounds = pc.min_max(flat).as_py()
    outside = classes and bounds["min"] is not None and (bounds["min"] < 0 or bounds["max"] >= classes)
    if nulls or outside:
        _name_bad_label(values, classes, where)
    return values


def _name_bad_label(values: pa.ChunkedArray, classes: int, where: str) -> None:
    for row, entry in enumerate(values.to_pylist()):
        for value in _leaves(entry):
            if value is None or (classes and not 0 <= value < classes):
                valid = f"in 0 to {classes - 1}" if classes else "an integer"
                remedy = "mend or leave out the row" + (
                    " (incomplete: leave_out)" if value is entry is None and not is_list(values.type) else ""
                )
                raise DataError(f"{where}, row {row}: label {value} is not {valid}; {remedy}")


def _leaves(entry: Any) -> Iterator[int | None]:
    if isinstance(entry, list):
        for item in entry:
            yield from _leaves(item)
    else:
        yield entry


def _ids(table: ColumnTable, column: str | None, kept: Kept) -> tuple[str, ...]:
    place = table.place
    if column is None:
        count = table.read([]).num_rows
        rows = range(count) if kept.rows is None else np.flatnonzero(kept.rows).tolist()
        return tuple(f"{place}:{row}" for row in rows)
    values = kept.of(table.column(column)).to_pylist()
    if None in values:
        raise DataError(f"{place}, column '{column}', row {values.index(None)}: no id; every item needs one")
    ids = tuple(map(str, values))
    if len(set(ids)) < len(ids):
        twice, count = Counter(ids).most_common(1)[0]
        raise DataError(
            f"{place}, column '{column}': id '{twice}' occurs {count} times; "
            "an item is one row (several captions go into a list), or leave `id` out"
        )
    return ids
