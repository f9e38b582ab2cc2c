"""Class prototypes: means by class, and their mean over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.losses.precision import in_full_precision


class ClassMeans(NamedTuple):
    """Means of the c classes that somebody has, of all classes that there are."""

    means: Float[Tensor, "c d"]
    """In the order of the classes."""
    counts: Int[Tensor, " c"]
    """Samples behind each mean."""
    present: Bool[Tensor, " classes"]
    """Which classes these are."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.present), self.means.shape[1]

    def require(self, samples: int) -> None:
        """Raise PayloadError unless this can be what somebody with so many samples, each of one class, has."""
        means, counts, present = self
        if present.dtype != torch.bool or present.ndim != 1:
            raise PayloadError(f"flags of classes are {_described(present)}, expected bool [classes]")
        expected = int(present.sum())
        if means.dtype != torch.float32 or means.ndim != 2 or len(means) != expected:
            raise PayloadError(f"class means are {_described(means)}, expected float32 [{expected}, d] as flagged")
        if counts.dtype != torch.int32 or tuple(counts.shape) != (expected,):
            raise PayloadError(f"class counts are {_described(counts)}, expected int32 [{expected}] as flagged")
        if not len(self.counts):
            raise PayloadError("no class is flagged; who has none sends no prototypes at all")
        fewest, total = int(self.counts.min()), int(self.counts.sum())
        if fewest < 1 or total > samples:
            raise PayloadError(
                f"class counts are {fewest} or more and {total} in sum, expected at least 1 and at most {samples}, "
                "with which the client joined"
            )

    def clipped(self) -> ClassMeans:
        """The same with means of norm 1 at most, as means of unit vectors are: noise and rounding make them longer."""
        norms = torch.linalg.vector_norm(self.means, dim=1, keepdim=True)
        return self._replace(means=self.means / norms.clamp_min(1))

    def mix_with_server(self, old: GlobalPrototypes | None, mixing: float) -> ClassMeans:
        """The same as far as a server follows it: P + mixing (mean - P) of classes with a global prototype P."""
        if old is None or mixing == 1:
            return self
        rows, known = table(*old).to(self.means)[self.present], old.present.to(self.present.device)[self.present]
        return self._replace(means=torch.where(known[:, None], torch.lerp(rows, self.means, mixing), self.means))


class GlobalPrototypes(NamedTuple):
    """Global prototypes of the c classes that have one."""

    means: Float[Tensor, "c d"]
    """In the order of the classes."""
    present: Bool[Tensor, " classes"]
    """Which classes these are."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.present), self.means.shape[1]


PrototypeTable = TypeVar("PrototypeTable", ClassMeans, GlobalPrototypes)


def prototype_tensors(space: str, prototypes: ClassMeans | GlobalPrototypes) -> dict[str, Tensor]:
    """Tensors of a class space by name, ``<space>.means`` and so on; what ``by_space`` reads.

    >>> prototypes = GlobalPrototypes(torch.zeros(1, 4), torch.tensor([True]))
    >>> list(prototype_tensors("label", prototypes))
    ['label.means', 'label.present']
    """
    return {f"{space}.{part}": tensor for part, tensor in prototypes._asdict().items()}


def by_space(tensors: Mapping[str, Tensor], table_type: type[PrototypeTable]) -> dict[str, PrototypeTable]:
    """Prototypes by class space.

    Raises:
        PayloadError: a space has not just the tensors that it should.

    >>> sent = prototype_tensors("label", GlobalPrototypes(torch.zeros(1, 4), torch.tensor([True])))
    >>> list(by_space(sent, GlobalPrototypes))
    ['label']
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        space, _, part = name.rpartition(".")
        parts.setdefault(space, {})[part] = tensor
    for space, fields in parts.items():
        if fields.keys() != set(table_type._fields):
            raise PayloadError(f"prototypes of '{space}' have {sorted(fields)}, expected {sorted(table_type._fields)}")
    return {space: table_type(**fields) for space, fields in parts.items()}


class ClassAverage:
    """Running means of features by class, summed in fp32 and in a fixed order.

    >>> average = ClassAverage(3, 2)
    >>> average.add(torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 5.0]]), torch.tensor([0, 0, 2]))
    >>> average.result().means
    tensor([[2., 0.],
            [5., 5.]])
    """

    def __init__(self, classes: int, dim: int, device: torch.device | str = "cpu") -> None:
        """Start without samples: ``classes`` classes, features of width ``dim``."""
        self._sums = torch.zeros(classes, dim, device=device)
        self._counts = torch.zeros(classes, dtype=torch.int32, device=device)
        self._classes = torch.arange(classes, device=device)

    @in_full_precision
    def add(self, features: Float[Tensor, "b d"], labels: Int[Tensor, " b"]) -> None:
        member = labels[:, None] == self._classes
        self._sums += member.float().T @ features.float()  # index_add_ has no fixed order on a GPU
        self._counts += member.sum(0)

    def result(self) -> ClassMeans:
        """Means of the classes that have samples."""
        present = self._counts > 0
        counts = self._counts[present]
        return ClassMeans(self._sums[present] / counts[:, None], counts, present)


def table(means: Float[Tensor, "c d"], present: Bool[Tensor, " classes"]) -> Float[Tensor, "classes d"]:
    """The means with a row for every class, 0 where it is absent.

    >>> table(torch.tensor([[1.0, 2.0]]), torch.tensor([False, True])).tolist()
    [[0.0, 0.0], [1.0, 2.0]]
    """
    rows = means.new_zeros(len(present), means.shape[1])
    rows[present] = means
    return rows


def mean_prototypes(sent: Sequence[ClassMeans]) -> GlobalPrototypes:
    """Mean over the clients that have a class of their means, each counting alike.

    Raises:
        PayloadError: there are no clients, or they differ in classes or width.

    >>> one, both = torch.tensor([True, False]), torch.tensor([True, True])
    >>> first = ClassMeans(torch.tensor([[2.0]]), torch.tensor([9]), one)
    >>> second = ClassMeans(torch.zeros(2, 1), torch.tensor([1, 1]), both)
    >>> mean_prototypes([first, second]).means.tolist()
    [[1.0], [0.0]]
    """
    if not sent:
        raise PayloadError("no client sent prototypes; there is no mean of nothing")
    shapes = sorted({one.shape for one in sent})
    if len(shapes) > 1:
        raise PayloadError(f"prototypes of {shapes[0]} and {shapes[1]} (classes, width) cannot be averaged")
    sums = sent[0].means.new_zeros(shapes[0])
    clients = sums.new_zeros(len(sums))
    for one in sent:
        sums[one.present] += one.means
        clients[one.present] += 1
    present = clients > 0
    return GlobalPrototypes(sums[present] / clients[present, None], present)


def renewed(new: GlobalPrototypes, old: GlobalPrototypes | None) -> GlobalPrototypes:
    """Global prototypes after a round; classes that nobody sent keep theirs, which absent clients may still need.

    >>> old = GlobalPrototypes(torch.tensor([[1.0], [2.0]]), torch.tensor([True, True]))
    >>> new = GlobalPrototypes(torch.tensor([[5.0]]), torch.tensor([False, True]))
    >>> renewed(new, old).means.tolist()
    [[1.0], [5.0]]
    """
    if old is None:
        return new
    rows = torch.where(new.present[:, None], table(*new), table(*old).to(new.means))
    present = new.present | old.present.to(new.present.device)
    return GlobalPrototypes(rows[present], present)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
