from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Inputs, Samples
from polyfed.data.union import union


class Table:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = 0.0 if generator is None else torch.rand((), generator=generator)
        return self.values[rows] + noise


def samples(start: int, items: list[int], matches: list[int] | None = None, **classes: tuple[str, ...]) -> Samples:
    pictures: Inputs = Table(torch.arange(5.0)[:, None] + start)
    words: Inputs = Table(torch.arange(7)[:, None] + 10 * start)
    return Samples(
        inputs={"a": pictures, "b": words},
        rows={"a": torch.tensor(items), "b": torch.tensor(items) + 1},
        items=torch.tensor(items),
        targets={"label": torch.tensor(items) % 2, **({"more": torch.tensor(items)} if start else {})},
        ids=tuple(f"{start}/{k}" for k in range(5)),
        classes=classes,
        **({} if matches is None else {"matches": torch.tensor(matches)}),
    )


def test_parts_of_one_data_set_are_a_part_of_it() -> None:
    whole = samples(0, [0, 1, 2, 3, 4], [1, 1, 3, 0, 0], label=("even", "odd"))
    parts = [whole.subset(torch.tensor(index)) for index in ([3, 0], [4], [1])]
    found = union(parts)
    expected = whole.subset(torch.tensor([3, 0, 4, 1]))
    assert found.inputs == expected.inputs
    assert found.ids is expected.ids
    assert found.classes == expected.classes
    for name in ("items", "matches"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    for kind in ("rows", "targets"):
        assert all(torch.equal(each, getattr(expected, kind)[key]) for key, each in getattr(found, kind).items())


def test_data_sets_side_by_side() -> None:
    left, right = samples(0, [4, 0, 2]), samples(100, [1, 4], [7, 7])
    found = union([left, right, left.subset(torch.tensor([1]))])
    assert found.items.tolist() == [4, 0, 2, 6, 9, 0]
    assert found.matches.tolist() == [4, 0, 2, 12, 12, 0]
    assert [found.ids[item] for item in found.items.tolist()] == ["0/4", "0/0", "0/2", "100/1", "100/4", "0/0"]
    assert list(found.targets) == ["label"]
    batch = found.batch(torch.tensor([3, 0, 4, 1]))
    assert batch.inputs["a"].flatten().tolist() == [101, 4, 104, 0]
    assert batch.inputs["b"].flatten().tolist() == [1002, 5, 1005, 1]
    assert batch.targets["label"].tolist() == [1, 0, 0, 0]
    assert len(found.inputs["a"]) == 10
    assert found.batch(torch.tensor([], dtype=torch.int64)).inputs["a"].shape == (0, 1)


def test_targets_of_different_width_are_filled_up() -> None:
    left, right = (
        replace(samples(0, [1, 2]), targets={"votes": torch.full((2, width), width)}, classes={}) for width in (2, 3)
    )
    assert union([left, right]).targets["votes"].tolist() == [[2, 2, -1], [2, 2, -1], [3, 3, 3], [3, 3, 3]]


def test_views_draw_from_one_stream() -> None:
    found = union([samples(0, [1]), samples(50, [1])])
    first, again = (found.batch(torch.tensor([0, 1]), torch.Generator().manual_seed(1)).inputs["a"] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, found.batch(torch.tensor([0, 1])).inputs["a"])


class Texts(Table):
    """Rows of tokens, cut to the longest of a batch, padded with 9."""

    pad = 9

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        chosen = self.values[rows]
        return chosen[:, : int((chosen != self.pad).sum(1).max())]


def test_texts_of_different_length_are_padded_alike() -> None:
    short, long = Texts(torch.tensor([[1, 9, 9], [2, 3, 9]])), Texts(torch.tensor([[4, 5, 6], [7, 9, 9]]))
    rows = {"a": torch.tensor([0, 1])}
    items = torch.tensor([0, 1])
    sets = [Samples({"a": texts}, rows, items, {}, ("x", "y"), {}) for texts in (short, long)]
    found = union([union(sets), sets[0]])  # of a union as well
    assert found.batch(torch.tensor([2, 0])).inputs["a"].tolist() == [[4, 5, 6], [1, 9, 9]]
    assert found.batch(torch.tensor([0, 3])).inputs["a"].tolist() == [[1], [7]]
    assert found.batch(torch.tensor([4, 2])).inputs["a"].tolist() == [[1, 9, 9], [4, 5, 6]]


def test_what_makes_no_union() -> None:
    left, right = samples(0, [1], label=("cat", "dog")), samples(1, [1], label=("dog", "cat"))
    with pytest.raises(ConfigError, match="the classes of 'label' differ"):
        union([left, right])
    with pytest.raises(ConfigError, match=r"samples of \['a', 'b'\] and of \['a'\] make no union"):
        union([left, replace(left.only(["a"]))])
