"""Tokenizers and their learnt vocabularies."""

import json
import re
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from item_tables import column_of, unread
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.tokenizers import (
    Glove,
    Hashing,
    PretrainedTokenizer,
    Tokenizer,
    Wordpiece,
    Words,
    vocabulary_of_words,
    words_of,
)
from polyfed.data.view import DataContext

CAPTIONS = [["A dog runs.", "The dog, running!"], ["A cat sits on the mat"], ["the cat and THE dog"]]


def context(tmp_path: Path, **changed: object) -> DataContext:
    given = {"cache": tmp_path, "weights": tmp_path, "public": {"words": column_of(CAPTIONS)}}
    return DataContext(**(given | changed))


def test_words_are_runs_of_letters_and_digits() -> None:
    assert words_of("A dog's T-shirt, n° 42: über_cool!") == ["a", "dog", "s", "t", "shirt", "n", "42", "über", "cool"]
    assert words_of(" .!\n") == []


def test_words_by_frequency_then_alphabet(tmp_path: Path) -> None:
    found = Words(min_count=2).ready("words", context(tmp_path))
    assert found.tokens == ("<pad>", "<unk>", "the", "dog", "a", "cat")
    assert found.encode(["The cat saw a dog.", "", "dog dog dog"], 4) == [[2, 5, 1, 4], [], [3, 3, 3]]
    assert Words(min_count=1, size=4).ready("words", context(tmp_path)).tokens == ("<pad>", "<unk>", "the", "dog")


def test_a_hash_is_stable_and_in_range(tmp_path: Path) -> None:
    nothing = DataContext(cache=tmp_path)
    found = Hashing(size=1000).ready("anything", nothing)
    assert found.encode(["Dog cat dog", "!"], 2) == [[185, 391], []], "the same on every machine, so a literal"
    small = Hashing(size=10).ready("anything", nothing)
    assert small.tokens == ("<pad>", "<unk>", *(f"#{number}" for number in range(2, 10)))
    ids = {number for row in small.encode([" ".join(map(str, range(300)))], 300) for number in row}
    assert ids == set(range(2, 10))


def test_wordpieces_split_unknown_words(tmp_path: Path) -> None:
    texts = ["running jumping singing", "run jump sing runs jumps sings", "runner jumper singer"] * 5
    found = Wordpiece(size=100).ready("words", context(tmp_path, public={"words": column_of(texts)}))
    assert found.tokens[:2] == ("<pad>", "<unk>")
    (row,) = found.encode(["springing"], 20)
    assert "".join(found.tokens[number].removeprefix("##") for number in row) == "springing"
    assert len(row) < len("springing"), "some pieces are longer than a letter"
    assert found.encode(["Rúnning", "☃", ""], 20) == [found.encode(["running"], 20)[0], [1], []]
    assert len(found.encode(["run jump sing"], 2)[0]) == 2


def test_wordpieces_are_the_same_at_every_training() -> None:
    words = [a + b + c for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    texts = [" ".join(words[k::7]) for k in range(7)]
    trained = [Wordpiece(size=150).learn(texts) for _ in range(4)]
    assert len(set(trained)) == 1
    assert any(len(token.removeprefix("##")) > 1 for token in trained[0][2:]), "some letters were joined"


@pytest.mark.parametrize("kind", [Words(min_count=1), Wordpiece(size=100)])
class TestLearnt:
    def test_learnt_once_for_a_context(self, kind: Tokenizer, tmp_path: Path) -> None:
        here = context(tmp_path)
        assert kind.ready("words", here) is kind.ready("words", here)

    def test_kept_in_the_run_folder(self, kind: Tokenizer, tmp_path: Path) -> None:
        run = tmp_path / "run"
        first = kind.ready("words", context(tmp_path, bundles=run))
        (file,) = run.iterdir()
        assert json.loads(file.read_text())["tokens"] == list(first.tokens)
        # the same data, but a call that must not happen: the vocabulary comes from the file
        again = kind.ready("words", context(tmp_path, bundles=run, public={"words": unread(nested=True)}))
        assert again.tokens == first.tokens
        assert again.encode(["a dog and a sphinx"], 9) == first.encode(["a dog and a sphinx"], 9)
        kind.ready("words", context(tmp_path, bundles=run, public={"words": column_of(["x"], "other")}))
        assert len(list(run.iterdir())) == 2

    def test_damaged_file_is_named(self, kind: Tokenizer, tmp_path: Path) -> None:
        kind.ready("words", context(tmp_path, bundles=tmp_path))
        (file,) = tmp_path.glob("vocabulary-*.json")
        file.write_text("{")
        with pytest.raises(DataError, match=rf"{file.name}: not readable .*remove the file"):
            kind.ready("words", context(tmp_path, bundles=tmp_path))

    def test_needs_the_public_set(self, kind: Tokenizer, tmp_path: Path) -> None:
        message = "learns from the public set, which has no 'notes' .it has: words.; use 'hashing' or 'pretrained'"
        with pytest.raises(ConfigError, match=message):
            kind.ready("notes", context(tmp_path))


def folder(path: Path, *words: str) -> str:
    path.mkdir()
    (path / "words.txt").write_text("\n".join(words) + "\n")
    return path.name


def test_glove_folders_side_by_side(tmp_path: Path) -> None:
    folders = folder(tmp_path / "one", "the", "dog"), folder(tmp_path / "two", "dog", "cat", "<unk>")
    found = Glove(folders=folders).ready("anything", context(tmp_path, public={}))
    assert found.tokens == ("<pad>", "<unk>", "the", "dog", "cat")
    assert found.encode(["The cat, the bird"], 9) == [[2, 4, 2, 1]]
    absolute = Glove(folders=(str(tmp_path / "one"),)).ready("anything", DataContext(cache=tmp_path))
    assert len(absolute.tokens) == 4


def test_glove_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"glove folder 'none': .*words\.txt.*data\.weights_dir or POLYFED_WEIGHTS"):
        Glove(folders=("none",)).ready("anything", context(tmp_path))


def vocabulary(path: Path, *tokens: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(tokens) + "\n")


@pytest.mark.parametrize("path", ["bert", "bert/vocab.txt"])
def test_pretrained_vocabulary(tmp_path: Path, path: str) -> None:
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "dog", "##s", "run"]
    vocabulary(tmp_path / "bert" / "vocab.txt", *tokens)
    found = PretrainedTokenizer(path=path).ready("anything", context(tmp_path))
    assert found.tokens == tuple(tokens)
    assert (found.pad, found.unknown, found.fixed) == (3, 0, (1, 2, 3, 4))
    assert found.encode(["Dogs run", "", "cat"], 9) == [[1, 5, 6, 7, 2], [1, 2], [1, 0, 2]]
    assert found.encode(["dogs run run"], 4) == [[1, 5, 6, 2]], "marks count towards the length and are kept"


def test_pretrained_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def fail(*_: object, **options: object) -> None:
        raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
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
    found = PretrainedTokenizer(path="me/bert").ready("anything", context(tmp_path))
    assert found.tokens == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "", "", "dog"), "gaps keep their ids"


def test_pretrained_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPadding:
        pad_token_id = None
        unk_token_id = 0

    monkeypatch.setattr(PretrainedTokenizer, "opened", lambda *_: NoPadding())
    with pytest.raises(ConfigError, match="tokenizer 'gpt' has no pad token"):
        PretrainedTokenizer(path="gpt").ready("anything", context(tmp_path))


@given(st.text(st.sampled_from("aZéß9_' .\n☃")), st.integers(1, 20))
def test_no_text_breaks_a_word_tokenizer(text: str, length: int) -> None:
    found = Hashing(size=16).load("anything", DataContext(cache=Path()))
    (row,) = found.encode([text], length)
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
    found = Words(min_count=1).ready("words", context(tmp_path, public={"words": column_of([text])}))
    assert [found.tokens[number] for number in found.encode([text], 20)[0]] == expected
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
    found = vocabulary_of_words(("<pad>", "<unk>", *dict.fromkeys(words)))
    assert ([found.tokens[number] for number in found.encode([text], 50)[0]] or ["<unk>"]) == (words or ["<unk>"])


@given(st.text(st.characters(max_codepoint=127), max_size=40))
def test_words_of_ascii_are_as_they_were(text: str) -> None:
    words = re.findall(r"[^\W_]+", text.lower())
    assert words_of(text) == words
    assert words_of(f"{text} ü")[:-1] == words


def test_word_pieces_keep_vowels_and_join_what_is_composed_otherwise(tmp_path: Path) -> None:
    texts = ["हिन्दी हिन्दू कु क", "Rúnning schöne Ёлка"] * 3
    found = Wordpiece(size=100).ready("words", context(tmp_path, public={"words": column_of(texts)}))
    assert found.encode(["कु"], 20) != found.encode(["क"], 20)
    for text in texts:
        assert found.encode([normalize("NFD", text)], 20) == found.encode([text], 20)
    assert found.encode(["schöne Ёлка"], 20) == found.encode(["schone Елка"], 20)
