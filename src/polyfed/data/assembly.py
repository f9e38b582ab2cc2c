"""From splits and views to samples, and the checks that keep public, private and test data apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.arrow import fingerprint_of, lacking, list_lengths
from polyfed.data.samples import Inputs, Samples
from polyfed.data.source import Column, Split
from polyfed.data.view import DataContext, View


def assemble(
    split: Split,
    views: Mapping[str, View],
    context: DataContext,
    *,
    layout: Sequence[str] = (),
    lazy: Mapping[str, View] = MappingProxyType({}),
) -> Samples:
    """All samples of a split, with the modalities that ``views`` names; the others are not loaded.

    An item with a list of values (captions, questions) makes one sample a value, and its other modalities repeat;
    all lists of an item must be equally long. Modalities in ``layout`` shape the samples without being loaded, so
    that a participant that has only pictures still counts a sample for every caption of the public set.

    Targets that ``lazy`` names are opened through a view and loaded with each batch, as masks; a name is that of a
    target or else of a column.

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

    def opened(chosen: Mapping[str, View]) -> dict[str, Inputs]:
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
        raise ConfigError(
            f"data.sources.{split.source}.columns has no '{modality}', which a model encodes; "
            f"it has: {', '.join(split.columns) or 'none'}"
        )
    return split.modality(modality)


def _items_of_samples(columns: Sequence[Column], count: int) -> Int64[Tensor, " n"]:
    """The item of each sample: one for each entry of the columns that hold lists."""
    nested = [column for column in columns if column.nested]
    if not nested:
        return torch.arange(count)
    own = [torch.from_numpy(list_lengths(column.values)) for column in nested]
    longest = torch.stack(own).amax(0)
    if any(column.gaps for column in columns):  # an item without entries may have another modality
        longest = longest.clamp(min=1)
    for column, lengths in zip(nested, own, strict=True):
        # an item that lacks a modality has no list of it
        differing = ((lengths != longest) & ~((lengths == 0) & column.gaps)).nonzero()[:, 0]
        if len(differing):
            raise _uneven(int(differing[0]), nested, own)
    return torch.repeat_interleave(torch.arange(count), longest)


def _uneven(item: int, nested: Sequence[Column], lengths: Sequence[Int64[Tensor, " n"]]) -> DataError:
    """What to raise for an item whose lists do not go together."""
    own = {column: int(of[item]) for column, of in zip(nested, lengths, strict=True)}
    if not any(own.values()):
        return DataError(f"item {item}: {nested[0].where} is an empty list; fill it, or leave out the row")
    first = max(own, key=own.__getitem__)
    other = next(column for column in own if own[column] != own[first])
    pair = " and ".join(column.where for column in nested if column in (first, other))
    return DataError(f"item {item}: {pair} hold lists of different length")


def _without_gaps(column: Column, items: Int64[Tensor, " n"]) -> tuple[Column, Int64[Tensor, " n"]]:
    """What is there of a column, and the row of each sample in it; -1 where a sample lacks it."""
    known, there = column.without_gaps()
    entries = torch.from_numpy(there)
    row = F.pad((entries.cumsum(0) - 1).masked_fill(~entries, -1), (0, 1), value=-1)
    if not column.nested:
        return known, row[items]
    lengths = torch.from_numpy(list_lengths(column.values))
    starts = lengths.cumsum(0) - lengths
    among = torch.arange(len(items)) - torch.searchsorted(items, items)  # place of a sample among its item's
    # the last row is that of no entry
    return known, row[torch.where(lengths[items] > 0, starts[items] + among, -1)]


def _groups(column: Column) -> Int64[Tensor, " n"]:
    """Equal numbers for equal values, in the order in which they first occur; a null or blank one is like no other."""
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
    """The samples of ``items``; those ``lacking`` a modality, by its name, are without."""
    chosen = samples.subset(torch.isin(samples.items, items).nonzero().squeeze(1)).lacking(lacking)
    # what a participant encodes is not all that items have: one that has nothing of it is no sample to it
    return (chosen.having_any(*samples.modalities) if samples.modalities else chosen).prepared()


def of_column(column: Column, items: Int64[Tensor, " k"]) -> Column:
    """A column restricted to some items; read when it is first looked at."""
    rows = items.numpy()
    stamp = fingerprint_of(column.fingerprint, hashlib.sha256(rows.tobytes()).hexdigest())
    return Column(lambda: column.values.take(pa.array(rows)), stamp, column.where, column.nested, folder=column.folder)


def order_of(samples: Samples, contents: Sequence[str] = ()) -> str:
    """A digest of which samples these are, what is in them, and in which order; participants compare it before rows
    are exchanged.

    Args:
        samples: of a public set.
        contents: digests of the columns that its items are read from.
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
            "draw public.source/public.split from data that nobody holds privately and nobody is tested on"
        )
