"""Samples: training and test data of a participant in any modalities; unions of sets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.device_memory import Column, DeviceMemory, Pending, each

_ITEMS = torch.empty(0, dtype=torch.int64)  # stands for: the same as the items

Rows = Int64[Tensor, " b"]
"""Row numbers, or positions of samples."""

Stream = torch.Generator | None
"""Random stream of the training view; None: the evaluation view."""


class Inputs(Protocol):
    """One modality of a data set, opened through a view: row numbers in, encoder input out.

    Optional attributes: ``pad``, the value (else 0) that fills up shorter inputs whose second dimension differs between
    batches, such as texts, where they are joined with others; ``of``, the modality whose draws the training view
    shares, as a mask shares those of its image; ``prepare``, a method that computes expensive inputs of rows ahead;
    ``still_bytes``, the size of a row's input if its training view is its evaluation view.
    """

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __call__(self, rows: Rows, generator: Stream = None) -> Tensor:
        """Encoder input of ``rows``, first dimension b, on the CPU.

        With a generator it is the training view (augmented, every draw from that generator); without, the
        evaluation view, which is deterministic.
        """
        ...


class _Blank:
    """Zeros in the shape of given inputs."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self.pad = inputs, getattr(inputs, "pad", None)

    def __len__(self) -> int:
        return len(self._inputs)

    def __call__(self, rows: Rows, generator: Stream = None) -> Tensor:
        return self._readable.new_zeros(len(rows), *self._readable.shape[1:])

    @cached_property
    def _readable(self) -> Tensor:
        """The first readable row; unreadable rows are why blank inputs are needed."""
        for row in range(len(self) - 1):
            with contextlib.suppress(Exception):
                return self._inputs(torch.tensor([row]))
        return self._inputs(torch.tensor([len(self) - 1]))


@dataclass(frozen=True)
class Batch:
    """Aligned samples in columns: entry i of every column belongs to the same sample.

    Attributes:
        inputs: modality -> encoder input, first dimension b; zeros where a sample lacks the modality.
        targets: target name (such as ``label``, or ``mask``) -> values, first dimension b.
        index: position of each sample in the set that the batch was drawn from.
        items: number of the item (image, document) of each sample; siblings, such as the captions of one
            image, share it.
        matches: samples with equal numbers are right answers to each other, as images with the same report; the
            items unless the source has a column for it.
        present: modality -> True for each sample that has it; without modalities that every sample has.
    """

    inputs: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    index: Int64[Tensor, " b"]
    items: Int64[Tensor, " b"]
    matches: Int64[Tensor, " b"] = _ITEMS
    present: Mapping[str, Bool[Tensor, " b"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.matches is _ITEMS:
            object.__setattr__(self, "matches", self.items)

    def __len__(self) -> int:
        return self.index.shape[0]

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with a change applied to every column."""

        def changed(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(column) for name, column in columns.items()}

        items = change(self.items)
        matches = items if self.matches is self.items else change(self.matches)
        columns = changed(self.inputs), changed(self.targets), change(self.index), items, matches
        return Batch(*columns, changed(self.present))

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; itself if it is there."""
        return self if self.index.device == device else self.each(lambda column: column.to(device))

    @property
    def no_loss(self) -> Tensor:
        """A loss of 0 without gradient, for batches in which no sample has the modalities of the loss."""
        return torch.zeros((), device=self.index.device)

    def by_modality(self) -> Iterator[tuple[str, Batch]]:
        """Each modality that at least two samples have, with those samples; batch statistics need two."""
        for name in self.inputs:
            own = self.having(name)
            if len(own) > 1:
                yield name, own

    def without_lone(self) -> Batch:
        """The same samples without modalities that only one of them has, as batch statistics need two."""
        if not self.present:
            return self
        return replace(self, present={name: mask & (mask.sum() != 1) for name, mask in self.present.items()})

    def having_any(self, *modalities: str) -> Batch:
        """The samples that have at least one of ``modalities``."""
        if not self.present or any(name not in self.present for name in modalities):
            return self
        nowhere = torch.zeros_like(self.index, dtype=torch.bool)
        there = torch.stack([nowhere, *(self.present[name] for name in modalities)]).any(0)
        return self.each(lambda column: column[there])

    def having(self, *modalities: str) -> Batch:
        """The samples that have all of ``modalities``."""
        masks = [self.present[name] for name in modalities if name in self.present]
        if not masks:
            return self
        there = torch.stack(masks).all(0)
        chosen = self.each(lambda column: column[there])
        return replace(chosen, present={name: mask for name, mask in chosen.present.items() if name not in modalities})


def _spread(loaded: Tensor, positions: Int64[Tensor, " k"], count: int) -> Tensor:
    """Rows at their positions among ``count``, zeros at the others."""
    return loaded.new_zeros(count, *loaded.shape[1:]).index_put((positions,), loaded)


@dataclass(frozen=True)
class Samples:
    """A fixed, ordered set of n samples over any number of modalities.

    Attributes:
        inputs: modality -> opened inputs; modalities that the participant does not own are absent.
        rows: modality -> row of each sample in those inputs, also of modalities that shape the samples without being
            loaded; siblings share the row of their image; -1 where a sample lacks the modality.
        items: number of the item of each sample.
        targets: target name -> values, first dimension n.
        ids: item number -> item id, for reports and for disjointness checks.
        classes: target name -> class names in label order, where the source has them.
        matches: see ``Batch``.
        lazy: target name -> opened values of targets that are too large for memory, such as masks; their rows are in
            ``rows``.
        memory: Memory of the device on which batches are made; None: the CPU.
    """

    inputs: Mapping[str, Inputs]
    rows: Mapping[str, Int64[Tensor, " n"]]
    items: Int64[Tensor, " n"]
    targets: Mapping[str, Tensor]
    ids: Sequence[str]
    classes: Mapping[str, tuple[str, ...]]
    matches: Int64[Tensor, " n"] = _ITEMS
    lazy: Mapping[str, Inputs] = field(default_factory=dict)
    memory: DeviceMemory | None = None

    def __post_init__(self) -> None:
        if self.matches is _ITEMS:
            object.__setattr__(self, "matches", self.items)

    def __len__(self) -> int:
        return self.items.shape[0]

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities that these samples have."""
        return tuple(self.inputs)

    def batch(self, index: Rows, generator: Stream = None, modalities: Sequence[str] | None = None) -> Batch:
        """The samples at ``index``: training view with a generator, evaluation view without.

        Only ``modalities`` (default: all) are loaded.
        """
        columns = self._gathered(index, generator, modalities)
        return Batch(**(columns if self.memory is None else self.memory.send(columns)()))

    def _gathered(self, index: Rows, generator: Stream, modalities: Sequence[str] | None = None) -> dict[str, Any]:
        """Columns of a batch, some of which a device has yet to compute."""
        names = self.modalities if modalities is None else modalities
        rows = {name: self.rows[name].index_select(0, index) for name in (*names, *self.lazy)}
        inputs, streams = dict[str, Column](), dict[str, Stream]()
        for name in names:
            streams[name] = generator.clone_state() if generator is not None and self.lazy else None
            inputs[name] = self._input(name, rows[name], generator)
        lazy = {name: self._lazily(name, rows, streams, generator) for name in self.lazy}
        there = {name: rows[name] >= 0 for name in names if name not in self._complete}
        items = self.items.index_select(0, index)
        return {
            "inputs": inputs,
            "targets": each(self.targets, lambda column: column.index_select(0, index)) | lazy,
            "index": index,
            "items": items,
            "matches": items if self.matches is self.items else self.matches.index_select(0, index),
            "present": {name: mask for name, mask in there.items() if not bool(mask.all())},
        }

    def _lazily(self, name: str, rows: Mapping[str, Rows], streams: Mapping[str, Stream], generator: Stream) -> Column:
        """Values of a target; with ``of`` it shares that modality's draws, for the samples that have the modality."""
        of = str(getattr(self.lazy[name], "of", ""))
        shown = rows[of if of in streams else name] >= 0
        return self._loaded(self.lazy[name], rows[name], streams.get(of, generator), shown)

    def load(self, modality: str, rows: Rows, generator: Stream = None) -> Tensor:
        """Encoder input of rows of a modality, as ``Inputs``; zeros for a row of -1."""
        return next(self.loads(modality, (rows,), generator))

    def loads(self, modality: str, parts: Iterable[Rows], generator: Stream = None) -> Iterator[Tensor]:
        """``load`` of each of the parts, one ahead on a device."""
        inputs: Iterator[dict[str, Any]] = ({modality: self._input(modality, rows, generator)} for rows in parts)
        return (columns[modality] for columns in (inputs if self.memory is None else self.memory.ahead(inputs)))

    def _input(self, modality: str, rows: Rows, generator: Stream) -> Column:
        if self.memory is None and modality in self._complete:
            return self.inputs[modality](rows, generator)
        return self._loaded(self.inputs[modality], rows, generator, rows >= 0)

    def _loaded(self, inputs: Inputs, rows: Rows, generator: Stream, there: Tensor) -> Column:
        """Values of the rows that are there, zeros for the others."""
        load = inputs if self.memory is None else partial(self.memory.column, inputs)
        if bool(there.all()):
            return load(rows, generator)
        if not bool(there.any()):
            return _Blank(inputs)(rows)
        n, loaded, positions = len(rows), load(rows[there], generator), there.nonzero()[:, 0]
        if isinstance(loaded, Tensor):
            return _spread(loaded, positions, n)
        parts, compute = loaded
        return Pending((*parts, positions), lambda *parts: _spread(compute(*parts[:-1]), parts[-1], n))

    def batches(self, size: int, generator: Stream = None) -> Iterator[Batch]:
        """One pass over all samples.

        With a generator: shuffled and in the training view; without: in order and in the evaluation view.
        """
        n = len(self)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        return self.batches_of(torch.split(order, size) if n else (), generator)

    def batches_of(self, parts: Iterable[Rows], generator: Stream = None) -> Iterator[Batch]:
        """``batch`` of each of the parts, one ahead on a device."""
        gathered = (self._gathered(index, generator) for index in parts)
        return (Batch(**columns) for columns in (gathered if self.memory is None else self.memory.ahead(gathered)))

    def distinct(self, modality: str) -> tuple[Int64[Tensor, " k"], Int64[Tensor, " n"]]:
        """The distinct rows of a modality, ascending, and the inverse index: the position among them of each sample."""
        if modality not in self._distinct:
            self._distinct[modality] = torch.unique(self.rows[modality], return_inverse=True)
        return self._distinct[modality]

    @cached_property
    def _complete(self) -> frozenset[str]:
        """Modalities that all samples have."""
        return frozenset(name for name, rows in self.rows.items() if bool((rows >= 0).all()))

    @cached_property
    def _distinct(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {}

    def subset(self, index: Int64[Tensor, " m"]) -> Samples:
        """The samples at ``index``, in that order; item numbers keep their meaning."""
        columns = {name: getattr(self, name) for name in ("rows", "items", "targets", "matches")}
        return replace(self, **each(columns, lambda column: column[index]))

    @property
    def still_bytes(self) -> float:
        """Bytes of a sample's inputs if its training view draws nothing and is the same in all batches, else inf."""
        return inf if self.lazy else sum(getattr(inputs, "still_bytes", None) or inf for inputs in self.inputs.values())

    def require_all(self, modality: str, what: str) -> None:
        """Raise DataError about ``what`` if a sample lacks a modality."""
        lacking = int((self.rows[modality] < 0).sum())
        if lacking:
            raise DataError(f"{what}: {lacking} of {len(self)} samples have no '{modality}'; use complete ones")

    def prepared(self) -> Samples:
        """The same samples, with their expensive inputs computed."""
        for name, inputs in self.inputs.items():
            if (prepare := getattr(inputs, "prepare", None)) is not None:
                prepare(self.rows[name][self.rows[name] >= 0])
        return self

    def having(self, *modalities: str) -> Samples:
        """The samples that have all of ``modalities``, in order."""
        there = torch.stack([self.rows[name] >= 0 for name in modalities]).all(0)
        return self if bool(there.all()) else self.subset(there.nonzero()[:, 0])

    def having_any(self, *modalities: str) -> Samples:
        """The samples that have at least one of ``modalities``, in order."""
        if not self._complete.isdisjoint(modalities):
            return self
        nowhere = torch.zeros(len(self), dtype=torch.bool)
        there = torch.stack([nowhere, *(self.rows[name] >= 0 for name in modalities)]).any(0)
        return self if bool(there.all()) else self.subset(there.nonzero()[:, 0])

    def lacking(self, items: Mapping[str, Int64[Tensor, " k"]]) -> Samples:
        """The same samples without the modality in its ``items``, except where it is the only one."""
        rows = dict(self.rows)
        for name, without in items.items():
            others = [rows[other] >= 0 for other in rows if other != name and other not in self.lazy]
            has_others = torch.stack(others).any(0) if others else torch.zeros(len(self), dtype=torch.bool)
            rows[name] = rows[name].masked_fill(torch.isin(self.items, without) & has_others, -1)
        return replace(self, rows=rows)

    def blank(self) -> Samples:
        """The same number of samples with zeros in place of every input and target."""
        return replace(
            self,
            inputs={name: _Blank(inputs) for name, inputs in self.inputs.items()},
            targets=each(self.targets, torch.zeros_like),
            lazy={name: _Blank(inputs) for name, inputs in self.lazy.items()},
        )

    def without_targets(self, names: Collection[str]) -> Samples:
        """The same samples without some of the targets."""
        return replace(
            self,
            targets={name: values for name, values in self.targets.items() if name not in names},
            classes={name: classes for name, classes in self.classes.items() if name not in names},
            lazy={name: inputs for name, inputs in self.lazy.items() if name not in names},
        )

    def only(self, modalities: Sequence[str]) -> Samples:
        """The same samples without the inputs of the other modalities."""
        return replace(self, inputs={name: self.inputs[name] for name in modalities})


@dataclass(frozen=True)
class _Chained:
    """Concatenated inputs, with consecutive row numbers."""

    parts: tuple[Inputs, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __call__(self, rows: Rows, generator: Stream = None) -> Tensor:
        starts = list(_starts(len(part) for part in self.parts))
        which = torch.bucketize(rows, torch.tensor(starts), right=True) - 1
        # each part loads all of its rows at once
        positions = [(which == number).nonzero().squeeze(1) for number in range(len(self.parts))]
        chosen = zip(self.parts, starts, positions, strict=True)
        loaded = [part(rows[own] - start, generator) for part, start, own in chosen if len(own)]
        if not loaded:
            return self.parts[0](rows, generator)
        longest = max((part.shape[1] for part in loaded if part.dim() > 1), default=0)
        padded = [_padded(part, longest, self.pad) if part.dim() > 1 else part for part in loaded]
        return torch.cat(padded)[torch.cat(positions).argsort()]

    @property
    def pad(self) -> int:
        return int(getattr(self.parts[0], "pad", 0))


def _padded(part: Tensor, length: int, pad: int) -> Tensor:
    missing = length - part.shape[1]
    filling = part.new_full((len(part), missing, *part.shape[2:]), pad)
    return torch.cat([part, filling], dim=1) if missing else part


def _together(targets: Sequence[Tensor]) -> Tensor:
    """Concatenated targets, padded with -1 to the longest."""
    longest = max((part.shape[1] for part in targets if part.dim() > 1), default=0)
    return torch.cat([_padded(part, longest, -1) if longest else part for part in targets])


def union(sets: Sequence[Samples]) -> Samples:
    """All samples of several sets with the same modalities, in order.

    Sets of one data set keep its numbers of items and right answers, so that equal numbers stay equal; those of
    different data sets get different numbers. Only targets of all sets remain.

    Raises:
        ConfigError: modalities, or class names of a target, differ.
    """
    first = sets[0]
    for other in sets[1:]:
        _require_alike(first, other)
    # samples of one data set, opened through the same views, share these objects
    keys = [(id(part.ids), *(id(load) for load in part.inputs.values())) for part in sets]
    of_key = dict(zip(keys, sets, strict=True))
    distinct, number = list(of_key.values()), [list(of_key).index(key) for key in keys]  # one set of each data set

    def apart(values: Sequence[Tensor], sizes: Sequence[int]) -> Int64[Tensor, " n"]:
        """Numbers of each set, offset by the sizes of the data sets before its own."""
        starts = _starts(sizes)
        return torch.cat([own + starts[data_set] for own, data_set in zip(values, number, strict=True)])

    chains = {key: tuple({**one.inputs, **one.lazy}[key] for one in distinct) for key in (*first.inputs, *first.lazy)}
    opened = {name: chain[0] if len(chain) == 1 else _Chained(chain) for name, chain in chains.items()}
    rows = {}
    for name, chain in chains.items():
        own = [part.rows[name] for part in sets]
        # missing rows stay missing
        rows[name] = apart(own, [len(inputs) for inputs in chain]).masked_fill(torch.cat(own) < 0, -1)
    matches = [0] * len(distinct)  # samples of different data sets are never right answers to each other
    for part, data_set in zip(sets, number, strict=True):
        matches[data_set] = max(matches[data_set], int(part.matches.max()) + 1 if part.matches.numel() else 0)
    targets = [name for name in first.targets if all(name in part.targets for part in sets)]
    return Samples(
        inputs={name: opened[name] for name in first.inputs},
        rows=rows,
        items=apart([part.items for part in sets], [len(part.ids) for part in distinct]),
        targets={name: _together([part.targets[name] for part in sets]) for name in targets},
        # the same list object marks the same data set
        ids=first.ids if len(distinct) == 1 else [name for part in distinct for name in part.ids],
        classes={name: classes for name, classes in first.classes.items() if name in targets},
        matches=apart([part.matches for part in sets], matches),
        lazy={name: opened[name] for name in first.lazy},
        memory=first.memory,
    )


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _require_alike(left: Samples, right: Samples) -> None:
    if set(left.modalities) != set(right.modalities):
        both = f"samples of {list(left.modalities)} and of {list(right.modalities)}"
        raise ConfigError(f"{both} make no union; choose sets with the same modalities")
    if left.lazy.keys() != right.lazy.keys():
        raise ConfigError(f"samples with masks {list(left.lazy)} and {list(right.lazy)} make no union")
    for name in left.classes.keys() & right.classes.keys():
        if tuple(left.classes[name]) != tuple(right.classes[name]):
            raise ConfigError(f"the classes of '{name}' differ, so the samples make no union")
