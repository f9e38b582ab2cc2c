"""The view of texts as token ids."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from item_tables import column_of, unread
from polyfed.core.errors import DataError
from polyfed.core.randomness import generator
from polyfed.data.source import Column
from polyfed.data.tokenizers import Hashing, Vocabulary, Words
from polyfed.data.view import DataContext
from polyfed.data.views.tokens import TokenRows, Tokens, matrix_of

WORDS = Words(min_count=1)


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    return DataContext(
        cache=tmp_path, public={"words": column_of(["one two three four five", "one two three", "one two"])}
    )


def numbers(texts: list[list[int]]) -> Vocabulary:
    """A vocabulary whose texts are numbers separated by blanks; 0 pads, 1 is unknown, 2 and 3 are marks."""
    return Vocabulary((), lambda rows, length: [[int(n) for n in row.split()][:length] for row in rows], fixed=(2, 3))


def rows_of(*texts: list[int], drop: float = 0.0, delete: float = 0.0) -> TokenRows:
    vocabulary = numbers([])
    ids = matrix_of(vocabulary, [" ".join(map(str, text)) for text in texts], 64)
    return TokenRows(ids, vocabulary, drop, delete)


@pytest.mark.parametrize(
    ("values", "rows", "expected"),
    [
        # by frequency, then alphabet: one, two 2 and 3, three 4, five 5, four 6; padded to the longest of the batch
        (["three", "two one", "One, two; five!"], [2, 0], [[2, 3, 5], [4, 0, 0]]),
        (["three", "two one", "One, two; five!"], [0], [[4]]),
        ([["one", "two"], [], ["three"]], [0, 1, 2], [[2], [3], [4]]),  # lists one after the other
        (["", " ?! ", "zebra"], [0, 1, 2], [[1], [1], [1]]),  # a text without words is one unknown
        (["one two three four five"], [0], [[2, 3, 4, 6]]),  # cut at four
    ],
)
def test_texts_become_rows_of_ids(context: DataContext, values: list, rows: list[int], expected: list) -> None:
    inputs = Tokens(tokenizer=WORDS, length=4).open(column_of(values), "words", context)
    ids = inputs(torch.tensor(rows))
    assert ids.tolist() == expected
    assert ids.dtype == torch.int64
    assert inputs(torch.tensor([], dtype=torch.int64)).shape[0] == 0


def test_texts_are_tokenised_once_for_all_runs_of_a_machine(context: DataContext) -> None:
    def ids(view: Tokens, column: Column) -> list:
        other_run = DataContext(context.cache, public=context.public)
        return view.open(column, "words", other_run)(torch.arange(2)).tolist()

    view, texts = Tokens(tokenizer=WORDS, length=4), column_of(["three", "two one"])
    first = ids(view, texts)
    assert ids(view, unread(texts.fingerprint)) == first
    (path,) = context.cache.glob("tokens-*.npy")
    path.write_bytes(b"damaged")
    assert ids(view, texts) == first
    for other in (Tokens(tokenizer=WORDS, length=2), Tokens(tokenizer=Words(size=4, min_count=1), length=4)):
        ids(other, texts)
    ids(view, column_of(["three", "two one"], "changed"))
    assert len(list(context.cache.glob("tokens-*.npy"))) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["one", None], "pets/train, column 'x', row 1: no value"),
        ([["one"], ["two", None]], "row 1, entry 1: no value"),
        ([["one"], None], "row 1: no value"),
        ([1, 2], "holds int64, not texts"),
    ],
)
def test_missing_texts_are_named(context: DataContext, values: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Tokens(tokenizer=Hashing()).open(column_of(values), "words", context)


def test_tokenised_once_for_a_context(context: DataContext) -> None:
    view = Tokens(tokenizer=WORDS)
    view.open(column_of(["one"]), "words", context)
    assert len(view.open(unread(nested=False), "words", context)) == 1
    other = view.open(column_of(["two", "one"], "other"), "words", context)
    assert len(other) == 2


def test_spec_has_the_vocabulary(context: DataContext) -> None:
    spec = Tokens(tokenizer=WORDS, length=7).spec("words", context)
    assert spec.shape == (7,)
    assert spec.vocabulary == ("<pad>", "<unk>", "one", "two", "three", "five", "four")
    assert spec.pad == 0


def test_damage_depends_on_its_generator_alone() -> None:
    inputs = rows_of(*([*range(5, 25)] for _ in range(8)), drop=0.3, delete=0.3)
    rows = torch.arange(8)
    state = torch.get_rng_state()
    first = inputs(rows, generator(1))
    assert torch.equal(first, inputs(rows, generator(1)))
    assert not torch.equal(first, inputs(rows, generator(2)))
    assert torch.equal(state, torch.get_rng_state())
    assert len(first.unique(dim=0)) > 1, "equal texts are damaged each in its own way"


def test_drop_equals_a_loop() -> None:
    texts = [[2, *range(5, 5 + n), 3] for n in (1, 4, 9)]
    found = rows_of(*texts, drop=0.5)(torch.arange(3), generator(1))
    draws = torch.rand(3, 11, generator=generator(1))
    for i, text in enumerate(texts):
        expected = [1 if n >= 5 and draws[i, k] < 0.5 else n for k, n in enumerate(text)]
        assert found[i, : len(text)].tolist() == expected
        assert found[i, len(text) :].tolist() == [0] * (11 - len(text))
    assert (found == 1).any()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.sampled_from([0.1, 0.25, 0.5, 0.99]))
def test_delete_takes_a_share_and_keeps_the_order(lengths: list[int], share: float) -> None:
    texts = [[2, *range(5, 5 + n), 3] for n in lengths]
    found = rows_of(*texts, delete=share)(torch.arange(len(texts)), generator(1))
    for row, text in zip(found.tolist(), texts, strict=True):
        kept = [n for n in row if n]
        assert len(kept) == len(text) - int((len(text) - 2) * share)
        assert row[: len(kept)] == kept, "gaps are closed"
        assert kept == [*sorted(kept[:-1], key=text.index), 3], "the order is kept, and both marks"
        assert set(kept) <= set(text)
    assert found.shape[1] == max(sum(n > 0 for n in row) for row in found.tolist())


@pytest.mark.parametrize("ahead", [True, False])
def test_the_share_of_unknown_words_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead: bool) -> None:
    known = {"words": column_of(["a dog runs", "a dog sits"])}
    context = DataContext(cache=tmp_path, public=known, ahead=ahead)
    with caplog.at_level("INFO"):
        for texts in (["a dog", "a dog runs"], ["a dog", "ein Hund läuft"]):
            inputs = Tokens(tokenizer=Words(min_count=1)).open(column_of(texts, texts[1]), "words", context)
            inputs(torch.tensor([0]))
    assert [(record.levelname, record.getMessage().split(": ")[1]) for record in caplog.records] == [
        ("INFO", "0.0 % of its words are unknown to the tokenizer"),
        ("WARNING", "60.0 % of its words are unknown to the tokenizer"),
    ]
