"""Samples: what a participant trains or is tested on, whatever its modalities."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Int64
from torch import Tensor

_ITEMS = torch.empty(0, dtype=torch.int64)  # stands for: the same as the items


class Inputs(Protocol):
    """One modality of a data set, opened through a view: row numbers in, encoder input out.

    Inputs whose second dimension differs between batches, such as texts, say with an attribute ``pad`` what shorter
    ones are filled up with (0 without) where they are joined with others.
    """

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Tensor:
        """Encoder input of ``rows``, first dimension b, on the CPU.

        With a generator it is the training view (augmented, every draw from that generator); without, the
        evaluation view, which is deterministic.
        """
        ...


class _Blank:
    """Zeros in the shape of other inputs."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self.pad = inputs, getattr(inputs, "pad", None)

    def __len__(self) -> int:
        return len(self._inputs)

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Tensor:
        return self._readable.new_zeros(len(rows), *self._readable.shape[1:])

    @cached_property
    def _readable(self) -> Tensor:
        """The first row that can be read; what cannot is why somebody asks for blank ones."""
        for row in range(len(self) - 1):
            with contextlib.suppress(Exception):
                return self._inputs(torch.tensor([row]))
        return self._inputs(torch.tensor([len(self) - 1]))


@dataclass(frozen=True)
class Batch:
    """Aligned samples: entry i of every input and target belongs to the same sample.

    Attributes:
        inputs: modality -> encoder input, first dimension b.
        targets: target name (such as ``label``) -> values, first dimension b.
        index: position of each sample in the set that the batch was drawn from.
        items: number of the item (picture, document) of each sample; siblings, such as the captions of one
            picture, share it.
        matches: samples with equal numbers are right answers to each other, as pictures with the same report; the
            items unless the source says more.
    """

    inputs: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    index: Int64[Tensor, " b"]
    items: Int64[Tensor, " b"]
    matches: Int64[Tensor, " b"] = _ITEMS

    def __post_init__(self) -> None:
        if self.matches is _ITEMS:
            object.__setattr__(self, "matches", self.items)

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return Batch(
            inputs={name: value.to(device, non_blocking=True) for name, value in self.inputs.items()},
            targets={name: value.to(device, non_blocking=True) for name, value in self.targets.items()},
            index=self.index.to(device, non_blocking=True),
            items=self.items.to(device, non_blocking=True),
            matches=self.matches.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Samples:
    """A fixed, ordered set of n samples over any number of modalities.

    Attributes:
        inputs: modality -> opened inputs; a modality that the participant does not own is simply absent.
        rows: modality -> row of each sample in those inputs, also of modalities that shape the samples without being
            loaded; siblings point at the same row of a shared picture.
        items: number of the item of each sample.
        targets: target name -> values, first dimension n.
        ids: item number -> item id, for reports and for disjointness checks.
        classes: target name -> class names in label order, where the source has them.
        matches: see ``Batch``.
    """

    inputs: Mapping[str, Inputs]
    rows: Mapping[str, Int64[Tensor, " n"]]
    items: Int64[Tensor, " n"]
    targets: Mapping[str, Tensor]
    ids: Sequence[str]
    classes: Mapping[str, tuple[str, ...]]
    matches: Int64[Tensor, " n"] = _ITEMS

    def __post_init__(self) -> None:
        if self.matches is _ITEMS:
            object.__setattr__(self, "matches", self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities that these samples have."""
        return tuple(self.inputs)

    def batch(
        self,
        index: Int64[Tensor, " b"],
        generator: torch.Generator | None = None,
        modalities: Sequence[str] | None = None,
    ) -> Batch:
        """The samples at ``index``: training view with a generator, evaluation view without.

        Only ``modalities`` (default: all) are loaded.
        """
        names = self.modalities if modalities is None else modalities
        items = self.items[index]
        return Batch(
            inputs={name: self.inputs[name](self.rows[name][index], generator) for name in names},
            targets={name: values[index] for name, values in self.targets.items()},
            index=index,
            items=items,
            matches=self._matches(index, items),
        )

    def _matches(self, index: Int64[Tensor, " b"], items: Int64[Tensor, " b"]) -> Int64[Tensor, " b"]:
        return items if self.matches is self.items else self.matches[index]

    def batches(
        self,
        size: int,
        generator: torch.Generator | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """One pass over all samples.

        With a generator: shuffled (unless ``shuffle`` is off) and in the training view; without: in order and in
        the evaluation view. ``drop_last`` leaves out a last batch of fewer than ``size`` samples, but never the
        only batch.
        """
        n = len(self)
        # without shuffling nothing is drawn: what is drawn later stays the same
        order = torch.randperm(n, generator=generator) if generator is not None and shuffle else torch.arange(n)
        for start in range(0, n, size):
            index = order[start : start + size]
            # a client with less than a batch would otherwise never train
            if drop_last and len(index) < size and start > 0:
                return
            yield self.batch(index, generator)

    def distinct(self, modality: str) -> tuple[Int64[Tensor, " k"], Int64[Tensor, " n"]]:
        """The distinct rows of a modality, ascending, and the place of each sample's among them."""
        rows, places = torch.unique(self.rows[modality], return_inverse=True)
        return rows, places

    def subset(self, index: Int64[Tensor, " m"]) -> Samples:
        """The samples at ``index``, in that order; item numbers keep their meaning."""
        items = self.items[index]
        return replace(
            self,
            rows={name: rows[index] for name, rows in self.rows.items()},
            items=items,
            targets={name: values[index] for name, values in self.targets.items()},
            matches=self._matches(index, items),
        )

    def blank(self) -> Samples:
        """As many samples that say nothing: zeros in place of every input and target."""
        return replace(
            self,
            inputs={name: _Blank(inputs) for name, inputs in self.inputs.items()},
            targets={name: torch.zeros_like(values) for name, values in self.targets.items()},
        )

    def without_targets(self, names: Collection[str]) -> Samples:
        """The same samples without some of the targets."""
        return replace(
            self,
            targets={name: values for name, values in self.targets.items() if name not in names},
            classes={name: classes for name, classes in self.classes.items() if name not in names},
        )

    def only(self, modalities: Sequence[str]) -> Samples:
        """The same samples without the inputs of the other modalities."""
        return replace(self, inputs={name: self.inputs[name] for name in modalities})
