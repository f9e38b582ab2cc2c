"""Institutions of a first experiment: their files show what each has, and what they must agree on is unified."""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from polyfed.core.errors import ConfigError, DataError, PolyfedError, nearest
from polyfed.data.arrow import class_names, is_list, is_text, unless_blank
from polyfed.data.files import holds_texts
from polyfed.data.preparation import ColumnRoles
from polyfed.data.survey import nearly_equal_classes
from polyfed.data.tables import SplitTable, fitting_rows, spellings
from polyfed.runs import starter

_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,62}", re.ASCII)
_TAKEN = ("server", "public")  # names of other participants
_MOST = 100  # values of a column of sites


@dataclass(frozen=True)
class _Place:
    """Place of a site's data.

    Attributes:
        name: Name of the site.
        purpose: Purpose of the data.
        path: Path of its folder or file.
        options: Settings by the user.
        option: Command-line option for it, for messages.
    """

    name: str
    purpose: starter.DataKind
    path: Path
    options: Mapping[str, Any]
    option: str

    def table(self) -> SplitTable:
        """Its training rows, before splits are drawn."""
        layout = {key: value for key, value in self.options.items() if key not in _MEANINGS}
        source, _ = starter.bare_source(self.path, layout)
        return fitting_rows(source.rows("train", name=self.name, data_dir=None), source)


_MEANINGS = ("label", "fold_labels", "mask_values", "cells", "together")
_OF_KINDS = {"fold_labels": "label", "label": "label", "mask_values": "mask"}


def named_sites(given: Sequence[str], labels: Sequence[str], options: Mapping[str, Any]) -> list[starter.StarterSource]:
    """The data of sites.

    Args:
        given: NAME=PATH, or NAME=KIND:PATH where files may be of several kinds.
        labels: Columns of classes: of all sites that have them, or SITE=COLUMN.
        options: Settings for all; None: by default.

    Raises:
        ConfigError: a text is not of that form, or a name is given twice.
        DataError: data that cannot be read, are ambiguous, or do not suit those of other sites.
    """
    texts = dict[str, str]()
    for text in given:
        name, _, path = text.partition("=")
        if not path or not _NAME.fullmatch(name) or name in _TAKEN:
            names = f"NAME of letters, digits, _ and -, not {' or '.join(_TAKEN)}"
            raise ConfigError(f"--site {text}: needs the form NAME=FOLDER or NAME=FILE, {names}")
        if name in texts:
            raise ConfigError(f"--site {name} is given twice, {texts[name]} and {path}; give a site one folder or file")
        texts[name] = path
    pairs = [label.partition("=") for label in labels]
    own = {name: column for name, sign, column in pairs if sign}
    if unknown := own.keys() - texts.keys():
        raise ConfigError(f"--label {min(unknown)}=...: no such --site; {nearest(min(unknown), texts)}")
    common, used = [name for name, sign, _ in pairs if not sign], set[str]()
    every = []
    for name, text in texts.items():
        purpose, _, path = text.partition(":")
        layout = {key: value for key, value in options.items() if value not in (None, (), [])}
        place = _Place(name, "pairs", Path(path if purpose in starter.NEEDS else text), layout, f"--site {name}")
        with _at(place.option):
            table = place.table()
        column = own.get(name) or next((label for label in common if label in table.schema.names), None)
        used |= {column} if column else set()
        chosen = next((one for one in starter.NEEDS if one == purpose), None) or _purpose_of(place, table, column)
        every.append(replace(place, purpose=chosen, options=layout | ({"label": column} if column else {})))
    if lost := [label for label in common if label not in used]:
        raise ConfigError(f"--label {lost[0]}: no site has that column; leave it out, or name another")
    return _read(every)


def sites_of_column(
    paths: Mapping[starter.DataKind, Path], column: str, label: str | None, options: Mapping[str, Any]
) -> tuple[list[starter.StarterSource], list[str]]:
    """The data of sites in one table or folder, each the rows with a value of a column, and the decisions.

    Raises:
        ConfigError: the data are not one table or folder.
        DataError: the column is missing, or does not hold names of sites.
    """
    if len(paths) != 1:
        raise ConfigError(f"--by {column}: of which data? give one of --table, --texts, --pairs, --pictures, ...")
    ((purpose, path),) = paths.items()
    option, layout = f"--by {column}", {key: value for key, value in options.items() if value not in (None, (), [])}
    table = _Place("", purpose, path, layout, option).table()
    table.require(column, option)
    values = table.read(column)
    if is_list(values.type) or not (is_text(values.type) or pa.types.is_integer(values.type)):
        raise DataError(f"{option}: the column holds {values.type}; choose a column of strings or integers")
    if alike := nearly_equal_classes({"": table}, column):
        shown = " and ".join(f"{name!r} ({count})" for name, count in alike[0])
        raise DataError(f"{option}: {shown} differ in case, blanks or the writing of a number alone; spell them alike")
    counts = Counter((unless_blank(values) if is_text(values.type) else values).drop_null().to_pylist())
    if not 2 <= len(counts) <= min(_MOST, counts.total() // 2):
        what = f"{len(counts)} different values in {counts.total()} rows, which are not sites"
        raise DataError(f"{option}: the column has {what}; name another: {', '.join(table.schema.names)}")
    if label is None:
        label = ColumnRoles.of(starter.typed_columns(table, {column}), None).label if purpose != "table" else None
    every, names = [], dict[str, Any]()
    for value in sorted(counts):
        plain = unicodedata.normalize("NFKD", str(value)).encode("ascii", "ignore").decode()
        name = base = (re.sub(r"[^A-Za-z0-9]+", "-", plain).strip("-") or "site")[:50]
        while name in names or name in _TAKEN:
            name = f"{base}-{len(names) + 1}"
        names[name] = value
        own = layout | {"where": {column: value}} | ({"label": label} if label else {})
        every.append(_Place(name, purpose, path, own, f"{option}, {value!r}"))
    lines = [f"sites: {', '.join(f'{name} ({counts[value]} rows of {value!r})' for name, value in names.items())}"]
    if empty := table.count() - counts.total():
        lines.append(f"left out: {empty:,} of {table.count():,} rows, without '{column}'")
    return _read(every), lines


@contextlib.contextmanager
def _at(option: str) -> Iterator[None]:
    """Within the block errors begin with the option."""
    try:
        yield
    except PolyfedError as error:
        raise type(error)(f"{option}: {error}") from error


def _purpose_of(place: _Place, table: SplitTable, label: str | None) -> starter.DataKind:
    """Purpose of data, by their columns.

    Raises:
        DataError: two are possible, or none.
    """
    apart = place.options.get("together", ())
    roles = ColumnRoles.of(starter.typed_columns(table, apart), label)
    purposes = list[starter.DataKind]()
    if roles.mask or roles.audio:
        purposes = ["masks" if roles.mask else "sounds"]
    elif roles.image:
        # a column of classes that the user names decides
        purposes += ["pairs"] if roles.text and label is None else []
        purposes += ["pictures"] if roles.label else []
    else:
        cells, _ = starter.cells_of(table, label, apart)
        text = roles.text
        is_free = text is not None and (holds_texts(text) or 2 * len(table.read(text).unique()) > table.count())
        purposes += ["texts"] if is_free and roles.label else []
        purposes += ["table"] if not is_free or any(not cell.names for cell in cells.values()) else []
    if len(purposes) == 1:
        return purposes[0]
    names = ", ".join(table.schema.names)
    if not purposes:
        raise DataError(f"{place.option}={place.path}: columns {names} are none of {', '.join(starter.NEEDS)}")
    ways = " or ".join(f"{place.option}={purpose}:{place.path}" for purpose in purposes)
    raise DataError(f"{place.option}={place.path}: may be {' or '.join(purposes)} ({names}); choose with {ways}")


def _read(every: Sequence[_Place]) -> list[starter.StarterSource]:
    tables = {place.name: place.table() for place in every if place.purpose == "table"}
    shared, sources = _all_rows(list(tables.values())) if tables else None, list[starter.StarterSource]()
    for place in every:
        needs = starter.NEEDS[place.purpose]
        options = {key: value for key, value in place.options.items() if _OF_KINDS.get(key, "") in ("", *needs)}
        if place.purpose == "table" and "label" in options and shared is not None:
            apart = (*options.get("together", ()), *options.get("where", ()))
            options["cells"] = [*starter.cells_of(shared, options["label"], apart)[0]]
            if not options["cells"]:
                names = ", ".join(shared.schema.names)
                raise DataError(f"tables of sites have no columns to learn from in common: {names}")
        with _at(place.option):
            sources.append(starter.StarterSource.of(place.purpose, place.path, options, name=place.name))
    folds = next((place.options["fold_labels"] for place in every if "fold_labels" in place.options), None)
    for purpose in dict.fromkeys(source.purpose for source in sources):
        own = _agreed(purpose, [source for source in sources if source.purpose == purpose], folds)
        sources = [own.get(source.name, source) for source in sources]
    return sources


def _all_rows(tables: Sequence[SplitTable]) -> SplitTable:
    """All rows of several tables, with the columns that all have."""
    names = [name for name in tables[0].schema.names if all(name in table.schema.names for table in tables)]
    rows = [pa.table({name: table.read(name) for name in names}) for table in tables]
    try:
        joined = pa.concat_tables(rows, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"tables of sites: {error}; write the column alike at all of them") from error
    return replace(tables[0], read=joined.column, count=lambda: joined.num_rows, schema=joined.schema)


def _agreed(
    purpose: starter.DataKind, sources: Sequence[starter.StarterSource], folds: bool | None
) -> dict[str, starter.StarterSource]:
    """Sites with data of one purpose, by name, with settings that their networks share.

    Raises:
        DataError: they cannot agree, or the data are ambiguous.
    """
    starter.require_classes(sources, f"{purpose} of sites")
    details = dict.fromkeys(source.details for source in sources)
    detail = next(iter(details))
    if purpose == "sounds":
        detail = max(details, key=lambda text: int(text.split()[-1]))
    elif purpose == "table":
        detail = starter.cells_as_json(_all_rows([source.tables["train"] for source in sources]), sources[0].roles)
    elif len(details) > 1:
        shown = "; ".join(f"{source.name}: {source.details}" for source in sources)
        raise DataError(f"masks of sites mean different classes ({shown}); give --mask-values for all")
    agreed = {source.name: replace(source, details=detail) for source in sources}
    reading = _classes(sources, folds) if "label" in starter.NEEDS[purpose] and len(sources) > 1 else {}
    for name, source in agreed.items() if reading else ():
        own = {**source.settings.get("reading", {}), **reading}
        held = {value for table in source.tables.values() for value in table.read(str(source.roles.label)).to_pylist()}
        lacking = [] if "fold_labels" in reading else [one for one in reading["classes"]["label"] if one not in held]
        lacks = [f"its data lack {len(lacking)} of the sites' classes, such as '{lacking[0]}'"] if lacking else []
        settings, warnings = {**source.settings, "reading": own}, [*source.warnings, *lacks]
        agreed[name] = replace(source, settings=settings, warnings=warnings)
    return agreed


def _classes(sources: Sequence[starter.StarterSource], folds: bool | None) -> dict[str, Any]:
    """Settings of classes of all sites; empty where the data number or name them the same way everywhere."""
    columns = [table.read(str(one.roles.label)) for one in sources for table in one.tables.values()]
    named = [source.roles.label in class_names(source.tables["train"].schema) for source in sources]
    if any(named) or any(is_list(column.type) or pa.types.is_boolean(column.type) for column in columns):
        return {}
    if len({is_text(column.type) for column in columns}) > 1:
        types = sorted({str(column.type) for column in columns})
        raise DataError(f"classes of sites are of different types ({', '.join(types)}); write them alike")
    joined = pa.concat_tables([pa.table({"label": column}) for column in columns], promote_options="permissive")
    values = joined.column("label")
    if not is_text(values.type):
        return {"classes": {"label": sorted(values.unique().drop_null().to_pylist())}}
    every = SplitTable(joined.column, lambda: joined.num_rows, joined.schema, "sites", "all", str)
    are_folded = starter.are_one({"": every}, "label", folds, "classes of sites")
    groups = spellings(values.to_pylist()).values()
    classes = sorted(name for group in groups for name in (group[:1] if are_folded else group))
    return {"classes": {"label": classes}} | ({"fold_labels": True} if are_folded else {})
