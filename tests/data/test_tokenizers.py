"""Tokenizers, their learnt vocabularies, and the view of texts as token ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from item_tables import column_of, unread
from misbehaving import raising
from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import generator
from polyfed.data.source import Column
from polyfed.data.tokenizers import (
    Glove,
    Hashing,
    PretrainedTokenizer,
    Tokenizer,
    Vocabulary,
    Wordpiece,
    Words,
    vocabulary_of_words,
    words_of,
)
from polyfed.data.view import DataContext
from polyfed.data.views.tokens import TokenRows, Tokens, matrix_of

CAPTIONS = [["A dog runs.", "The dog, running!"], ["A cat sits on the mat"], ["the cat and THE dog"]]


def context(tmp_path: Path, **changed: object) -> DataContext:
    given = {"cache": tmp_path, "weights": tmp_path, "public": {"words": column_of(CAPTIONS)}}
    return DataContext(**(given | changed))


def test_words_are_runs_of_letters_and_digits() -> None:
    assert words_of("A dog's T-shirt, n° 42: über_cool!") == ["a", "dog", "s", "t", "shirt", "n", "42", "über", "cool"]
    assert words_of(" .!\n") == []


def test_words_by_frequency_then_alphabet(tmp_path: Path) -> None:
    result = Words(min_count=2).ready("words", context(tmp_path))
    assert result.tokens == ("<pad>", "<unk>", "the", "dog", "a", "cat")
    assert result.encode(["The cat saw a dog.", "", "dog dog dog"], 4) == [[2, 5, 1, 4], [], [3, 3, 3]]
    assert Words(min_count=1, size=4).ready("words", context(tmp_path)).tokens == ("<pad>", "<unk>", "the", "dog")


def test_a_hash_is_stable_and_in_range(tmp_path: Path) -> None:
    nothing = DataContext(cache=tmp_path)
    result = Hashing(size=1000).ready("anything", nothing)
    assert result.encode(["Dog cat dog", "!"], 2) == [[185, 391], []], "the same on every machine, so a literal"
    small = Hashing(size=10).ready("anything", nothing)
    assert small.tokens == ("<pad>", "<unk>", *(f"#{number}" for number in range(2, 10)))
    ids = {number for row in small.encode([" ".join(map(str, range(300)))], 300) for number in row}
    assert ids == set(range(2, 10))


def test_wordpieces_split_unknown_words(tmp_path: Path) -> None:
    texts = ["running jumping singing", "run jump sing runs jumps sings", "runner jumper singer"] * 5
    result = Wordpiece(size=100).ready("words", context(tmp_path, public={"words": column_of(texts)}))
    assert result.tokens[:2] == ("<pad>", "<unk>")
    (row,) = result.encode(["springing"], 20)
    assert "".join(result.tokens[number].removeprefix("##") for number in row) == "springing"
    assert len(row) < len("springing"), "some pieces are longer than a letter"
    assert result.encode(["Rúnning", "☃", ""], 20) == [result.encode(["running"], 20)[0], [1], []]
    assert len(result.encode(["run jump sing"], 2)[0]) == 2


def test_wordpieces_are_the_same_at_every_training() -> None:
    words = [a + b + c for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    texts = [" ".join(words[k::7]) for k in range(7)]
    trained = [Wordpiece(size=150).learn(texts) for _ in range(4)]
    assert len(set(trained)) == 1
    assert any(len(token.removeprefix("##")) > 1 for token in trained[0][2:]), "some letters were joined"


@pytest.mark.parametrize("learner", [Words(min_count=1), Wordpiece(size=100)])
class TestLearnt:
    def test_learnt_once_for_a_context(self, learner: Tokenizer, tmp_path: Path) -> None:
        here = context(tmp_path)
        assert learner.ready("words", here) is learner.ready("words", here)

    def test_kept_in_the_run_folder(self, learner: Tokenizer, tmp_path: Path) -> None:
        run = tmp_path / "run"
        first = learner.ready("words", context(tmp_path, bundles=run))
        (file,) = run.iterdir()
        assert json.loads(file.read_text())["tokens"] == list(first.tokens)
        # the same data, but a call that must not happen: the vocabulary comes from the file
        again = learner.ready("words", context(tmp_path, bundles=run, public={"words": unread(nested=True)}))
        assert again.tokens == first.tokens
        assert again.encode(["a dog and a sphinx"], 9) == first.encode(["a dog and a sphinx"], 9)
        learner.ready("words", context(tmp_path, bundles=run, public={"words": column_of(["x"], "other")}))
        assert len(list(run.iterdir())) == 2

    def test_damaged_file_is_named(self, learner: Tokenizer, tmp_path: Path) -> None:
        learner.ready("words", context(tmp_path, bundles=tmp_path))
        (file,) = tmp_path.glob("vocabulary-*.json")
        file.write_text("{")
        with pytest.raises(DataError, match=rf"{file.name}: not readable .*remove the file"):
            learner.ready("words", context(tmp_path, bundles=tmp_path))

    def test_needs_the_public_set(self, learner: Tokenizer, tmp_path: Path) -> None:
        message = "learns from the public set, which has no 'notes' .it has: words.; use 'hashing' or 'pretrained'"
        with pytest.raises(ConfigError, match=message):
            learner.ready("notes", context(tmp_path))


def folder(path: Path, *words: str, file: str = "words.txt") -> str:
    path.mkdir()
    (path / file).write_text("\n".join(words) + "\n")
    return path.name


def test_glove_folders_side_by_side(tmp_path: Path) -> None:
    folders = folder(tmp_path / "one", "the", "dog"), folder(tmp_path / "two", "dog", "cat", "<unk>")
    result = Glove(folders=folders).ready("anything", context(tmp_path, public={}))
    assert result.tokens == ("<pad>", "<unk>", "the", "dog", "cat")
    assert result.encode(["The cat, the bird"], 9) == [[2, 4, 2, 1]]
    assert len(Glove(folders=(str(tmp_path / "one"),)).ready("anything", DataContext(cache=tmp_path)).tokens) == 4


def test_glove_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"glove folder 'none': .*words\.txt.*data\.weights_dir or POLYFED_WEIGHTS"):
        Glove(folders=("none",)).ready("anything", context(tmp_path))


@pytest.mark.parametrize("path", ["bert", "bert/vocab.txt"])
def test_pretrained_vocabulary(tmp_path: Path, path: str) -> None:
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "dog", "##s", "run"]
    folder(tmp_path / "bert", *tokens, file="vocab.txt")
    result = PretrainedTokenizer(path=path).ready("anything", context(tmp_path))
    assert result.tokens == tuple(tokens)
    assert (result.pad, result.unknown, result.fixed) == (3, 0, (1, 2, 3, 4))
    assert result.encode(["Dogs run", "", "cat"], 9) == [[1, 5, 6, 7, 2], [1, 2], [1, 0, 2]]
    assert result.encode(["dogs run run"], 4) == [[1, 5, 6, 2]], "marks count towards the length and are kept"


def test_pretrained_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    error = OSError("We couldn't connect to the hub\nand more")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", raising(error))
    message = r"tokenizer 'no/such' can be loaded neither from '.*no/such' nor the hub"
    with pytest.raises(ConfigError, match=message):
        PretrainedTokenizer(path="no/such").ready("anything", context(tmp_path))


def test_pretrained_from_the_hub_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    ids = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "dog": 7}
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda name, **_: transformers.BertTokenizer(vocab=ids) if name == "me/bert" else None,
    )
    result = PretrainedTokenizer(path="me/bert").ready("anything", context(tmp_path))
    assert result.tokens == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "", "", "dog"), "gaps keep their ids"


def test_pretrained_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPadding:
        pad_token_id = None
        unk_token_id = 0

    monkeypatch.setattr(PretrainedTokenizer, "opened", lambda *_: NoPadding())
    with pytest.raises(ConfigError, match="tokenizer 'gpt' has no pad token"):
        PretrainedTokenizer(path="gpt").ready("anything", context(tmp_path))


@given(st.text(st.sampled_from("aZéß9_' .\n☃")), st.integers(1, 20))
def test_no_text_breaks_a_word_tokenizer(text: str, length: int) -> None:
    (row,) = Hashing(size=16).load("anything", DataContext(cache=Path())).encode([text], length)
    assert len(row) == min(length, len(words_of(text)))
    assert all(2 <= number < 16 for number in row)


# ---- words of all scripts

SCRIPTS = {
    "German": ("Über schöne Größe", ["über", "schöne", "größe"]),
    "Hebrew": ("שָׁלוֹם, עוֹלָם!", ["שָׁלוֹם", "עוֹלָם"]),
    "Arabic": ("مُحَمَّدٌ كَتَبَ؟ لا", ["مُحَمَّدٌ", "كَتَبَ", "لا"]),
    "Persian": ("می\u200cخواهم کتاب", ["میخواهم", "کتاب"]),
    "Devanagari": ("हिन्दी में लिखो।", ["हिन्दी", "में", "लिखो"]),
    "Thai": ("สวัสดี\u200bครับ ปู่", ["สวัสดี", "ครับ", "ปู่"]),
    "Chinese": ("我爱你。abc中", ["我", "爱", "你", "abc", "中"]),
    "Greek": ("Ὁ ΟΔΟΣ, ΣΟΦΟΣ_Σ", ["ὁ", "οδος", "σοφος", "σ"]),
    "Turkish": ("İstanbul", ["i\u0307stanbul"]),
    "Vietnamese": ("Tiếng Việt", ["tiếng", "việt"]),
    "Korean": ("한국어 단어", ["한국어", "단어"]),
    "a damaged letter": ("Stra\ufffde é\ufffd \ufffd", ["stra", "e", "é"]),
    "hyphens": ("\ufeffco\u00adoperate", ["cooperate"]),
}
LETTERS = sorted({letter for text, _ in SCRIPTS.values() for letter in text} | set("aZ09_' .\n☃\ufffd"))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_words_of_a_script_are_its_own_however_they_are_composed(tmp_path: Path, script: str, form: Any) -> None:
    text, expected = SCRIPTS[script]
    expected = [normalize("NFC", word) for word in expected]
    text = normalize(form, text)
    assert words_of(text) == expected
    result = Words(min_count=1).ready("words", context(tmp_path, public={"words": column_of([text])}))
    assert [result.tokens[number] for number in result.encode([text], 20)[0]] == expected
    glove = Glove(folders=(folder(tmp_path / "vectors", *(normalize("NFD", word) for word in expected)),))
    assert 1 not in glove.ready("anything", context(tmp_path)).encode([text], 20)[0]


@given(st.text(st.sampled_from(LETTERS), max_size=40))
def test_words_are_those_of_composed_texts_and_keep_letters_and_marks(text: str) -> None:
    words = words_of(text)
    assert words == words_of(normalize("NFD", text)) == words_of(normalize("NFC", text))
    assert all(word and not category(word[0]).startswith("M") for word in words)
    assert all(category(letter)[0] in "LNM" for word in words for letter in word)
    letters = [letter for letter in normalize("NFD", text).lower() if category(letter)[0] in "LN"]
    kept = [letter for letter in normalize("NFD", "".join(words)) if category(letter)[0] in "LN"]
    assert [letter.replace("ς", "σ") for letter in kept] == [letter.replace("ς", "σ") for letter in letters]
    result = vocabulary_of_words(("<pad>", "<unk>", *dict.fromkeys(words)))
    assert ([result.tokens[number] for number in result.encode([text], 50)[0]] or ["<unk>"]) == (words or ["<unk>"])


@given(st.text(st.characters(max_codepoint=127), max_size=40))
def test_words_of_ascii_are_as_they_were(text: str) -> None:
    words = re.findall(r"[^\W_]+", text.lower())
    assert words_of(text) == words
    assert words_of(f"{text} ü")[:-1] == words


def test_word_pieces_keep_vowels_and_join_what_is_composed_otherwise(tmp_path: Path) -> None:
    texts = ["हिन्दी हिन्दू कु क", "Rúnning schöne Ёлка"] * 3
    result = Wordpiece(size=100).ready("words", context(tmp_path, public={"words": column_of(texts)}))
    assert result.encode(["कु"], 20) != result.encode(["क"], 20)
    for text in texts:
        assert result.encode([normalize("NFD", text)], 20) == result.encode([text], 20)
    assert result.encode(["schöne Ёлка"], 20) == result.encode(["schone Елка"], 20)


# ---- the view

WORDS = Words(min_count=1)


@pytest.fixture
def words_context(tmp_path: Path) -> DataContext:
    return context(tmp_path, public={"words": column_of(["one two three four five", "one two three", "one two"])})


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
def test_texts_become_rows_of_ids(words_context: DataContext, values: list, rows: list[int], expected: list) -> None:
    inputs = Tokens(tokenizer=WORDS, length=4).open(column_of(values), "words", words_context)
    ids = inputs(torch.tensor(rows))
    assert ids.tolist() == expected
    assert ids.dtype == torch.int64
    assert inputs(torch.tensor([], dtype=torch.int64)).shape[0] == 0


def test_texts_are_tokenised_once_for_all_runs_of_a_machine(words_context: DataContext) -> None:
    def ids(view: Tokens, column: Column) -> list:
        other_run = DataContext(words_context.cache, public=words_context.public)
        return view.open(column, "words", other_run)(torch.arange(2)).tolist()

    view, texts = Tokens(tokenizer=WORDS, length=4), column_of(["three", "two one"])
    first = ids(view, texts)
    assert ids(view, unread(texts.fingerprint)) == first
    (path,) = words_context.cache.glob("tokens-*.npy")
    path.write_bytes(b"damaged")
    assert ids(view, texts) == first
    for other in (Tokens(tokenizer=WORDS, length=2), Tokens(tokenizer=Words(size=4, min_count=1), length=4)):
        ids(other, texts)
    ids(view, column_of(["three", "two one"], "changed"))
    assert len(list(words_context.cache.glob("tokens-*.npy"))) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["one", None], "pets/train, column 'x', row 1: no value"),
        ([["one"], ["two", None]], "row 1, entry 1: no value"),
        ([["one"], None], "row 1: no value"),
        ([1, 2], "holds int64, not texts"),
    ],
)
def test_missing_texts_are_named(words_context: DataContext, values: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Tokens(tokenizer=Hashing()).open(column_of(values), "words", words_context)


def test_tokenised_once_for_a_context(words_context: DataContext) -> None:
    view = Tokens(tokenizer=WORDS)
    view.open(column_of(["one"]), "words", words_context)
    assert len(view.open(unread(nested=False), "words", words_context)) == 1
    assert len(view.open(column_of(["two", "one"], "other"), "words", words_context)) == 2


def test_spec_has_the_vocabulary(words_context: DataContext) -> None:
    spec = Tokens(tokenizer=WORDS, length=7).spec("words", words_context)
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
    result = rows_of(*texts, drop=0.5)(torch.arange(3), generator(1))
    draws = torch.rand(3, 11, generator=generator(1))
    for i, text in enumerate(texts):
        expected = [1 if n >= 5 and draws[i, k] < 0.5 else n for k, n in enumerate(text)]
        assert result[i, : len(text)].tolist() == expected
        assert result[i, len(text) :].tolist() == [0] * (11 - len(text))
    assert (result == 1).any()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.sampled_from([0.1, 0.25, 0.5, 0.99]))
def test_delete_takes_a_share_and_keeps_the_order(lengths: list[int], share: float) -> None:
    texts = [[2, *range(5, 5 + n), 3] for n in lengths]
    result = rows_of(*texts, delete=share)(torch.arange(len(texts)), generator(1))
    for row, text in zip(result.tolist(), texts, strict=True):
        kept = [n for n in row if n]
        assert len(kept) == len(text) - int((len(text) - 2) * share)
        assert row[: len(kept)] == kept, "gaps are closed"
        assert kept == [*sorted(kept[:-1], key=text.index), 3], "the order is kept, and both marks"
        assert set(kept) <= set(text)
    assert result.shape[1] == max(sum(n > 0 for n in row) for row in result.tolist())


@pytest.mark.parametrize("ahead", [True, False])
def test_the_share_of_unknown_words_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead: bool) -> None:
    known = {"words": column_of(["a dog runs", "a dog sits"])}
    words_context = DataContext(cache=tmp_path, public=known, ahead=ahead)
    with caplog.at_level("INFO"):
        for texts in (["a dog", "a dog runs"], ["a dog", "ein Hund läuft"]):
            inputs = Tokens(tokenizer=Words(min_count=1)).open(column_of(texts, texts[1]), "words", words_context)
            inputs(torch.tensor([0]))
    assert [(record.levelname, record.getMessage().split(": ")[1]) for record in caplog.records] == [
        ("INFO", "0.0 % of its words are unknown to the tokenizer"),
        ("WARNING", "60.0 % of its words are unknown to the tokenizer"),
    ]
