"""Samples from splits and views, classes of items, and the checks that keep public, private and test data apart."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.arrow import fingerprint_of, innermost, is_text, lacking
from polyfed.data.samples import Inputs, Samples
from polyfed.data.source import Column, Split
from polyfed.data.view import NO_VIEWS, DataContext, Views


def assemble(
    split: Split, views: Views, context: DataContext, *, layout: Sequence[str] = (), lazy: Views = NO_VIEWS
) -> Samples:
    """All samples of a split, with the modalities in ``views``; other modalities are not loaded.

    An item with a list of values (captions, questions) makes one sample a value, and its other modalities repeat;
    all lists of an item must be equally long. Modalities in ``layout`` shape the samples without being loaded, so
    that a participant with only images still counts one sample per caption of the public set.

    Targets in ``lazy``, by the name of a target or of a column, are opened through a view and loaded with each batch,
    as masks are.

    Where the split names a column of ``matches``, samples of items with equal values in it get equal numbers.

    Raises:
        ConfigError: the source has no column for a modality.
        DataError: a column is missing, or lists of an item differ in length.
    """
    columns = {name: _modality(split, name) for name in (*views, *layout)}
    columns |= {name: split.read(split.targets.get(name, name)) for name in lazy}
    labels = {name: split.read(column) for name, column in split.targets.items() if name not in lazy}
    items = _items_of_samples((*columns.values(), *labels.values()), len(split))
    positions = torch.arange(len(items))  # of a sample's value among those of a nested column

    def rows(column: Column) -> Int64[Tensor, " n"]:
        return positions if column.nested else items

    read = {
        name: _without_gaps(column, items) if column.gaps else (column, rows(column))
        for name, column in columns.items()
    }

    def opened(chosen: Views) -> dict[str, Inputs]:
        return {name: view.beside(views, context).open(read[name][0], name, context) for name, view in chosen.items()}

    return Samples(
        inputs=opened(views),
        rows={name: own for name, (_, own) in read.items()},
        items=items,
        targets={name: _labels(column)[rows(column)] for name, column in labels.items()},
        ids=split.ids,
        classes=split.classes,
        matches=items if split.matches is None else _groups(split.read(split.matches))[items],
        lazy=opened(lazy),
    )


def _modality(split: Split, modality: str) -> Column:
    if modality not in split.columns:
        what = f"data.sources.{split.source}.columns has no '{modality}', which a model encodes"
        raise ConfigError(f"{what}; it has: {', '.join(split.columns) or 'none'}")
    return split.modality(modality)


def _items_of_samples(columns: Sequence[Column], count: int) -> Int64[Tensor, " n"]:
    """Item of each sample: one sample per entry of the columns that hold lists."""
    nested = [column for column in columns if column.nested]
    if not nested:
        return torch.arange(count)
    own = [torch.from_numpy(column.lengths) for column in nested]
    longest = torch.stack(own).amax(0)
    if any(column.gaps for column in columns):  # an item without entries may have another modality
        longest = longest.clamp(min=1)
    for column, lengths in zip(nested, own, strict=True):
        # an item that lacks a modality has no list of it
        differing = ((lengths != longest) & ~((lengths == 0) & column.gaps)).nonzero()[:, 0]
        if len(differing):
            raise _uneven_lists(int(differing[0]), nested, own)
    return torch.repeat_interleave(torch.arange(count), longest)


def _uneven_lists(item: int, nested: Sequence[Column], lengths: Sequence[Int64[Tensor, " n"]]) -> DataError:
    """The error for an item whose lists differ in length."""
    own = {column: int(of[item]) for column, of in zip(nested, lengths, strict=True)}
    if not any(own.values()):
        return DataError(f"item {item}: {nested[0].where} is an empty list; fill it, or leave out the row")
    first = max(own, key=own.__getitem__)
    other = next(column for column in own if own[column] != own[first])
    pair = " and ".join(column.where for column in nested if column in (first, other))
    return DataError(f"item {item}: {pair} hold lists of different length")


def _without_gaps(column: Column, items: Int64[Tensor, " n"]) -> tuple[Column, Int64[Tensor, " n"]]:
    """A column without its gaps, and the row of each sample in it; -1 where a sample lacks it."""
    known, there = column.without_gaps()
    entries = torch.from_numpy(there)
    row = F.pad((entries.cumsum(0) - 1).masked_fill(~entries, -1), (0, 1), value=-1)
    if not column.nested:
        return known, row[items]
    lengths = torch.from_numpy(column.lengths)
    starts = lengths.cumsum(0) - lengths
    among = torch.arange(len(items)) - torch.searchsorted(items, items)  # place of a sample among its item's
    # the last row is that of no entry
    return known, row[torch.where(lengths[items] > 0, starts[items] + among, -1)]


def _groups(column: Column) -> Int64[Tensor, " n"]:
    """Equal numbers for equal values, in order of first occurrence; each null or blank value has its own number."""
    # a missing report is not the right answer to another missing one
    alone = torch.from_numpy(lacking(column.values))
    encoded = column.values.combine_chunks().dictionary_encode()
    codes = torch.from_numpy(pc.fill_null(encoded.indices, 0).to_numpy().astype("int64"))
    return torch.where(alone, len(encoded.dictionary) + torch.arange(len(codes)), codes)


def _labels(column: Column) -> Int64[Tensor, "n ..."]:
    flat = pc.list_flatten(column.values) if column.nested else column.values
    if pa.types.is_fixed_size_list(flat.type):
        return torch.from_numpy(pc.list_flatten(flat).to_numpy().astype("int64")).view(len(flat), flat.type.list_size)
    if flat.null_count:
        raise DataError(f"{column.where} has {flat.null_count} missing values; a target needs one for every sample")
    return torch.from_numpy(flat.to_numpy().astype("int64"))


def item_target(split: Split) -> str | None:
    return next((name for name, column in split.targets.items() if not split.read(column).nested), None)


def item_labels(split: Split) -> Int64[Tensor, " n"] | None:
    """One class an item, from the first target with one value an item; None if the split has none."""
    name = item_target(split)
    return None if name is None else _labels(split.read(split.targets[name]))


def of_items(
    samples: Samples, items: Int64[Tensor, " k"], lacking: Mapping[str, Int64[Tensor, " m"]] = MappingProxyType({})
) -> Samples:
    """Samples of ``items``; items in ``lacking`` lose the modality of that name."""
    chosen = samples.subset(torch.isin(samples.items, items).nonzero().squeeze(1)).lacking(lacking)
    # a participant encodes some of the modalities: an item without any of these is not a sample for it
    return (chosen.having_any(*samples.modalities) if samples.modalities else chosen).prepared()


def of_column(column: Column, items: Int64[Tensor, " k"]) -> Column:
    """A column restricted to some items; read at first use."""
    rows = items.numpy()
    stamp = fingerprint_of(column.fingerprint, hashlib.sha256(rows.tobytes()).hexdigest())
    return Column(lambda: column.of_items(rows), stamp, column.where, column.nested, folder=column.folder)


def order_of(samples: Samples, contents: Sequence[str] = ()) -> str:
    """Digest of the samples, their contents and their order; participants compare it before they exchange rows.

    Args:
        samples: Samples of a public set.
        contents: Digests of the columns that its items are read from.
    """
    digest = hashlib.sha256()
    for part in (*(samples.ids[item] for item in samples.items.tolist()), "", *contents):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def require_disjoint(public: Sequence[str], other: Sequence[str], what: str) -> None:
    """Raise DataError if a public item is also among ``other``, naming one and saying what to change."""
    shared = set(public) & set(other)
    if shared:
        raise DataError(
            f"the public set shares {len(shared)} items with {what}, for example '{min(shared)}'; "
            "draw public.source/public.split from data that no client holds and no model is tested on"
        )


# ---- classes of items, and items that mention words

Indices = npt.NDArray[np.int64]

MISSING = "missing"
"""Name of a null value, which is a value of its own."""


@dataclass(frozen=True)
class ItemClasses:
    """Class of every item of a split, and the columns that define the class.

    Attributes:
        numbers: class number of each item. Splits that are numbered together have equal numbers for equal classes.
        names: class number -> name, where the data have one.
        columns: column -> number of the value of each item; empty where the class is a target's.
        values: column -> names of its values, by their number.
    """

    numbers: Int64[Tensor, " n"]
    names: Mapping[int, str]
    columns: Mapping[str, Indices] = field(default_factory=dict)
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def highest(self) -> int:
        """The highest class number, of items or names."""
        return max([int(self.numbers.max()), *self.names])

    def counts(self, items: Int64[Tensor, " k"]) -> dict[str, int]:
        """Class name -> number of ``items`` in it, in the order of the class numbers, without zeros."""
        numbers, counts = torch.unique(self.numbers[items], return_counts=True)
        pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
        return {self.names.get(number, str(number)): count for number, count in pairs}

    def column_counts(self, items: Int64[Tensor, " k"]) -> dict[str, dict[str, int]]:
        """Column -> name of a value -> number of ``items`` that have it, zeros included."""
        rows = items.numpy()
        return {
            name: dict(zip(values, np.bincount(self.columns[name][rows], minlength=len(values)).tolist(), strict=True))
            for name, values in self.values.items()
        }


def item_classes(splits: Sequence[Split], of: Sequence[str], key: str) -> list[ItemClasses] | None:
    """Classes of the items of each split, with equal numbers for equal classes; None if they have none.

    Without columns it is the first target with one value an item. Columns that hold only 0 and 1 (or truth values)
    make the class sum_i bit_i 2^i, named after the columns that are 1. Otherwise it is the tuple of the columns'
    values, numbered in sorted order, first column first. Numbers do not depend on which columns are targets.

    Args:
        splits: splits of one source.
        of: Names of the columns.
        key: setting that names them, for messages.

    Raises:
        ConfigError: a column is missing, or holds neither integers nor booleans nor texts.
    """
    if not of:
        labels = [item_labels(split) for split in splits]
        names_of = [dict(enumerate(split.classes.get(item_target(split) or "", ()))) for split in splits]
        known = [ItemClasses(own, names) for own, names in zip(labels, names_of, strict=True) if own is not None]
        return known if len(known) == len(splits) else None
    columns = [_Joined(splits, name, f"{key}: '{name}'") for name in of]
    # columns that are all bits are a set of marks; one that is not makes tuples of them all
    numbers, names = (_bit_sums if all(column.is_bit for column in columns) else _tuples)(columns)
    values = {column.name: column.names for column in columns}
    classes, start = [], 0
    for split in splits:
        own = slice(start, start + len(split))
        codes = {column.name: column.codes[own] for column in columns}
        classes.append(ItemClasses(torch.from_numpy(numbers[own]), names, codes, values))
        start = own.stop
    return classes


def item_groups(split: Split, column: str, key: str) -> Int64[Tensor, " n"]:
    """Equal numbers for items with equal values of a column; each null or blank value has its own number.

    Raises:
        ConfigError: the same as for ``item_classes``.
    """
    joined = _Joined([split], column, f"{key}: '{column}'")
    texts = pa.array([None if value is None else str(value) for value in joined.values], pa.string())
    # an item without a patient is not of the same patient as another without one
    alone = lacking(pa.chunked_array([texts]))[joined.codes]
    return torch.from_numpy(np.where(alone, len(joined.values) + np.cumsum(alone) - 1, joined.codes))


class _Joined:
    """A column of several splits, concatenated.

    Attributes:
        name: Name of the column.
        values: distinct values in order, null first; class numbers for a target of texts.
        codes: index into ``values`` of each item's value.
        is_bit: True if the values are 0 and 1, or booleans.
        classes: names of the values 0, 1, ... of a target.
    """

    def __init__(self, splits: Sequence[Split], name: str, where: str) -> None:
        try:
            columns = [split.read(name) for split in splits]
        except DataError as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error
        parts = []
        for column in columns:
            dtype = column.values.type
            parts.append(column.values.cast(dtype.value_type) if pa.types.is_dictionary(dtype) else column.values)
            if not any(fits(parts[-1].type) for fits in (is_text, pa.types.is_integer, pa.types.is_boolean)):
                needed = "needed is one whole number, truth value or text an item"
                raise ConfigError(f"{where} holds {dtype} ({column.where}); {needed}")
        distinct = {value for part in parts for value in part.unique().to_pylist()}
        self.name = name
        # null is set apart, as it cannot be compared with other values
        self.values: list[Any] = sorted(distinct - {None})
        self.is_bit = distinct <= {0, 1} and not any(column.encoded for column in columns)
        named = (split.classes[key] for split in splits for key in split.classes if split.targets.get(key) == name)
        self.classes: Sequence[str] = next(named, ())
        if None in distinct:
            self.values.insert(0, None)
        codes = [pc.index_in(part, value_set=pa.array(self.values, part.type)).to_numpy() for part in parts]
        self.codes: Indices = np.concatenate(codes).astype(np.int64)

    @property
    def names(self) -> list[str]:
        return [_name(value, self.classes) for value in self.values]

    def label(self, code: int) -> str:
        """Name of a class with this value; a bare number is preceded by its column."""
        value, name = self.values[code], _name(self.values[code], self.classes)
        return name if isinstance(value, str) or self.classes else f"{self.name} {name}"


def _name(value: bool | int | str | None, classes: Sequence[str]) -> str:
    if value is None or isinstance(value, str):
        return MISSING if value is None else value
    return classes[value] if 0 <= value < len(classes) else str(int(value))


def _bit_sums(columns: Sequence[_Joined]) -> tuple[Indices, dict[int, str]]:
    """Sums of the columns' bits, named after the columns that are 1."""
    numbers = sum(np.array(column.values, np.int64)[column.codes] << bit for bit, column in enumerate(columns))
    assert isinstance(numbers, np.ndarray)
    names = {
        number: "+".join(column.name for bit, column in enumerate(columns) if number >> bit & 1) or "none"
        for number in np.unique(numbers).tolist()
    }
    return numbers, names


def _tuples(columns: Sequence[_Joined]) -> tuple[Indices, dict[int, str]]:
    numbers = np.zeros(len(columns[0].codes), dtype=np.int64)
    for column in columns:  # renumbered each time: the product of many columns' counts need not fit 64 bits
        _, numbers = np.unique(numbers * len(column.values) + column.codes, return_inverse=True)
    _, first = np.unique(numbers, return_index=True)
    names = [" / ".join(column.label(int(column.codes[item])) for column in columns) for item in first]
    return numbers, dict(enumerate(names))


def mentioning(column: Column, words: Iterable[str]) -> Bool[Tensor, " n"]:
    """True for each item with one of the words, singular or plural, as a separate word of a text, in any case.

    Underscores in words stand for spaces, as in class names. Without words the result is all false.

    Raises:
        ConfigError: the column holds no texts, or a word is blank.
    """
    dtype = innermost(column.values.type)
    if not is_text(dtype):
        raise ConfigError(f"public.without looks for words in texts, but {column.where} holds {dtype}; name another")
    forms = sorted({word.replace("_", " ").strip().lower() for word in words})
    if "" in forms:  # it would match next to every mark
        raise ConfigError("public.without has a blank word; leave it out")
    items = column.values.to_pylist()
    if not forms:
        return torch.zeros(len(items), dtype=torch.bool)
    # not \b, which never matches next to a word that ends in a mark, such as "c++"
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, forms))})(?:s|es)?(?!\w)")
    lists = items if column.nested else [[item] for item in items]
    mentioned = (any(pattern.search(text.lower()) for text in texts or () if text) for texts in lists)
    return torch.tensor([*mentioned], dtype=torch.bool)
