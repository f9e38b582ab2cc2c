"""Samples: alignment, order, views, assembly from columns, and several sets as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from item_tables import Table, in_memory
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.assembly import assemble, item_labels, of_items, order_of, require_disjoint
from polyfed.data.samples import Inputs, Samples, union
from polyfed.data.source import Split
from polyfed.data.view import DataContext, InputSpec, View

ROWS = {"key": ["a", "b", "c"], "number": [10, 20, 30], "label": [2, 0, 1]}
TABLE = pa.table(ROWS | {"notes": [[1, 2], [3], [4, 5, 6]], "marks": [[0, 1], [1], [0, 0, 1]]})


class Numbers(View):
    """The values of a column as they are; the training view adds a random offset."""

    def open(self, column, modality, context):
        flat = column.values.combine_chunks()
        values = torch.tensor((flat.flatten() if column.nested else flat).to_pylist())

        class Opened:
            def __len__(self) -> int:
                return len(values)

            def __call__(self, rows, generator=None):
                return values[rows] + (0 if generator is None else torch.rand(len(rows), generator=generator))

        return Opened()

    def spec(self, modality, context):
        return InputSpec(())


def split_of(columns: dict[str, str], targets: dict[str, str], table: pa.Table = TABLE, **options) -> Split:
    return in_memory(table, "key", columns=columns, targets=targets, **options)


def samples_of(columns: dict[str, str], targets: dict[str, str], views: list[str], **options) -> Samples:
    return assemble(split_of(columns, targets), {name: Numbers() for name in views}, DataContext(Path()), **options)


COLUMNS = {"sensor": "number", "note": "notes"}


def test_an_item_with_a_list_makes_a_sample_a_value() -> None:
    batch = samples_of(COLUMNS, {"label": "label"}, ["sensor", "note"]).batch(torch.arange(6))
    assert batch.inputs["sensor"].tolist() == [10, 10, 20, 30, 30, 30]
    assert batch.inputs["note"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.targets["label"].tolist() == [2, 2, 0, 1, 1, 1]
    assert batch.items.tolist() == [0, 0, 1, 2, 2, 2]


def test_a_party_without_the_nested_modality_counts_items_unless_the_layout_differs() -> None:
    assert len(samples_of(COLUMNS, {}, ["sensor"])) == 3
    samples = samples_of(COLUMNS, {}, ["sensor"], layout=("sensor", "note"))
    assert samples.items.tolist() == [0, 0, 1, 2, 2, 2]
    assert samples.modalities == ("sensor",)


def test_lists_of_different_length_are_refused() -> None:
    table = TABLE.set_column(4, "marks", pa.array([[0, 1], [1, 1], [0, 0, 1]]))
    with pytest.raises(DataError, match=r"item 1: .*'notes' and .*'marks'"):
        assemble(split_of(COLUMNS, {"m": "marks"}, table), {"note": Numbers()}, DataContext(Path()))


def test_a_modality_without_a_column_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\.s\.columns has no 'radar'.*sensor, note"):
        samples_of(COLUMNS, {}, ["radar"])


def test_batches_visit_every_sample_once_in_a_seeded_order() -> None:
    samples = samples_of(COLUMNS, {}, ["note"])
    order = [batch.index.tolist() for batch in samples.batches(4, torch.Generator().manual_seed(1))]
    assert sorted(index for batch in order for index in batch) == list(range(6))
    assert order == [batch.index.tolist() for batch in samples.batches(4, torch.Generator().manual_seed(1))]
    assert [batch.index.tolist() for batch in samples.batches(4)] == [[0, 1, 2, 3], [4, 5]]


def test_the_training_view_needs_a_generator_and_evaluation_is_plain() -> None:
    samples = samples_of(COLUMNS, {}, ["note"])
    assert samples.batch(torch.tensor([0, 3])).inputs["note"].tolist() == [1, 4]
    assert samples.batch(torch.tensor([0, 3]), torch.Generator().manual_seed(0)).inputs["note"].tolist() != [1, 4]


def test_subsets_keep_items_together_and_modalities_can_be_left_out() -> None:
    part = of_items(samples_of(COLUMNS, {"label": "label"}, ["sensor", "note"]), torch.tensor([2, 0]))
    assert part.items.tolist() == [0, 0, 2, 2, 2]
    assert part.batch(torch.tensor([2])).inputs["note"].tolist() == [4]
    assert part.only(["note"]).modalities == ("note",)
    assert list(part.batch(torch.tensor([0]), modalities=["sensor"]).inputs) == ["sensor"]


def test_the_order_of_a_public_set_depends_on_items_and_order() -> None:
    samples = samples_of(COLUMNS, {}, ["note"])
    swapped = samples.subset(torch.tensor([2, 0, 1, 3, 4, 5]))
    assert order_of(samples) == order_of(samples_of(COLUMNS, {}, ["sensor"], layout=("note",)))
    assert order_of(samples) != order_of(swapped)


def test_item_labels_are_the_first_target_with_a_value_an_item() -> None:
    assert item_labels(split_of(COLUMNS, {"m": "marks", "label": "label"})).tolist() == [2, 0, 1]
    assert item_labels(split_of(COLUMNS, {"m": "marks"})) is None


def test_right_answers_are_the_item_itself_unless_the_source_adds_some() -> None:
    assert samples_of(COLUMNS, {}, ["note"]).matches.tolist() == [0, 0, 1, 2, 2, 2]
    split = split_of(COLUMNS, {}, TABLE.append_column("same", pa.array([7, None, 7])), matches="same")
    samples = assemble(split, {"note": Numbers()}, DataContext(Path()))
    first, alone, last = samples.matches[[0, 2, 3]].tolist()
    assert first == last != alone
    assert samples.matches.tolist() == [first, first, alone, first, first, first]
    part = samples.subset(torch.tensor([2, 5]))
    assert part.batch(torch.tensor([1, 0])).matches.tolist() == [first, alone]
    assert part.only([]).matches.tolist() == [alone, first]


def test_an_overlap_with_the_public_set_is_an_error() -> None:
    require_disjoint(["a", "b"], ["c"], "client 'x'")
    with pytest.raises(DataError, match="shares 1 items with client 'x', for example 'b'"):
        require_disjoint(["a", "b"], ["b", "c"], "client 'x'")


def lacking() -> Samples:
    """Four samples, of which the second has no sensor and the third no note."""
    samples = samples_of(COLUMNS, {"label": "label"}, ["sensor", "note"]).subset(torch.tensor([0, 2, 3, 4]))
    return replace(samples, rows={"sensor": torch.tensor([0, -1, 2, 2]), "note": torch.tensor([0, 2, -1, 4])})


def test_what_a_sample_lacks_is_zero_and_marked_absent() -> None:
    batch = lacking().batch(torch.tensor([2, 1, 0]))
    assert batch.inputs["sensor"].tolist() == [30, 0, 10]
    assert batch.inputs["note"].tolist() == [0, 3, 1]
    present = {"sensor": [True, False, True], "note": [False, True, True]}
    assert {name: mask.tolist() for name, mask in batch.present.items()} == present
    assert lacking().batch(torch.tensor([0, 3])).present == {}
    assert lacking().batch(torch.tensor([1, 1])).inputs["sensor"].tolist() == [0, 0]


def test_samples_and_batches_are_narrowed_to_those_that_have_some_modalities() -> None:
    samples, batch = lacking(), lacking().batch(torch.arange(4))
    assert samples.having("sensor").items.tolist() == batch.having("sensor").items.tolist() == [0, 2, 2]
    both = batch.having("sensor", "note")
    assert (both.index.tolist(), both.targets["label"].tolist(), both.present) == ([0, 3], [2, 1], {})
    assert batch.having() is batch
    assert both.having("note") is both


def test_samples_that_lack_a_modality_keep_lacking_it_in_a_union() -> None:
    left, right = lacking(), replace(lacking(), ids=("a", "b", "c"))
    joined = union([left, right]).batch(torch.arange(8))
    assert joined.inputs["sensor"].tolist() == [10, 0, 30, 30] * 2
    assert joined.present["note"].tolist() == [True, True, False, True] * 2


def test_a_lazy_target_is_loaded_with_its_batch() -> None:
    samples = samples_of(COLUMNS, {"label": "label"}, ["sensor"], lazy={"notes": Numbers()})
    batch = samples.subset(torch.tensor([5, 1, 0])).batch(torch.tensor([0, 1]))
    assert list(batch.inputs) == ["sensor"]
    assert {name: values.tolist() for name, values in batch.targets.items()} == {"label": [1, 2], "notes": [6, 2]}
    assert samples.blank().batch(torch.tensor([0])).targets["notes"].tolist() == [0]
    assert list(samples.without_targets(["notes"]).batch(torch.tensor([0])).targets) == ["label"]


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
    complete = samples(0, [0, 1, 2, 3, 4], [1, 1, 3, 0, 0], label=("even", "odd"))
    result = union([complete.subset(torch.tensor(index)) for index in ([3, 0], [4], [1])])
    expected = complete.subset(torch.tensor([3, 0, 4, 1]))
    assert result.inputs == expected.inputs
    assert result.ids is expected.ids
    assert result.classes == expected.classes
    for name in ("items", "matches"):
        assert torch.equal(getattr(result, name), getattr(expected, name))
    for form in ("rows", "targets"):
        assert all(torch.equal(each, getattr(expected, form)[key]) for key, each in getattr(result, form).items())


def test_data_sets_side_by_side() -> None:
    left, right = samples(0, [4, 0, 2]), samples(100, [1, 4], [7, 7])
    result = union([left, right, left.subset(torch.tensor([1]))])
    assert result.items.tolist() == [4, 0, 2, 6, 9, 0]
    assert result.matches.tolist() == [4, 0, 2, 12, 12, 0]
    assert [result.ids[item] for item in result.items.tolist()] == ["0/4", "0/0", "0/2", "100/1", "100/4", "0/0"]
    assert list(result.targets) == ["label"]
    batch = result.batch(torch.tensor([3, 0, 4, 1]))
    assert batch.inputs["a"].flatten().tolist() == [101, 4, 104, 0]
    assert batch.inputs["b"].flatten().tolist() == [1002, 5, 1005, 1]
    assert batch.targets["label"].tolist() == [1, 0, 0, 0]
    assert len(result.inputs["a"]) == 10
    assert result.batch(torch.tensor([], dtype=torch.int64)).inputs["a"].shape == (0, 1)


def test_targets_of_different_width_are_filled_up() -> None:
    votes = [{"votes": torch.full((2, width), width)} for width in (2, 3)]
    joined = union([replace(samples(0, [1, 2]), targets=own, classes={}) for own in votes])
    assert joined.targets["votes"].tolist() == [[2, 2, -1], [2, 2, -1], [3, 3, 3], [3, 3, 3]]


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
    result = union([union(sets), sets[0]])  # of a union as well
    assert result.batch(torch.tensor([2, 0])).inputs["a"].tolist() == [[4, 5, 6], [1, 9, 9]]
    assert result.batch(torch.tensor([0, 3])).inputs["a"].tolist() == [[1], [7]]
    assert result.batch(torch.tensor([4, 2])).inputs["a"].tolist() == [[1, 9, 9], [4, 5, 6]]


def test_what_makes_no_union() -> None:
    left, right = samples(0, [1], label=("cat", "dog")), samples(1, [1], label=("dog", "cat"))
    with pytest.raises(ConfigError, match="the classes of 'label' differ"):
        union([left, right])
    with pytest.raises(ConfigError, match=r"samples of \['a', 'b'\] and of \['a'\] make no union"):
        union([left, replace(left.only(["a"]))])
