"""Text files give what their author meant, whatever system and program wrote them, or an error with its line."""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyfed.core.errors import DataError
from polyfed.data.dialects import delimited_rows
from polyfed.data.files import read_annotations
from polyfed.data.sources.folder import Folder
from zoo import pictures

ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
SIGNS = st.text(" ,;\t|\"\r\n'#ab1é\u2028", max_size=6)
FIELD = (ANY | SIGNS).map(lambda text: text.replace("\r", "\r\n"))  # Python 3.11 writes a lone \r without quotes
NAMES = ["text", "label", "c", "d"]


@given(
    st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(FIELD, min_size=width, max_size=width), min_size=1)),
    st.sampled_from(",;\t|"),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC]),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
@example([["a", '"great'], ["b", 'bad"']], "\t", csv.QUOTE_MINIMAL, "\n")
@example([["one", "a\rb"]], ",", csv.QUOTE_MINIMAL, "\n")
@example([[" a", ' "b, c"']], ",", csv.QUOTE_MINIMAL, "\n")
def test_what_was_written_comes_back_or_is_named(rows: list[list[str]], delimiter: str, quoting: Any, end: str) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, quoting=quoting, lineterminator=end)
    writer.writerows([NAMES[: len(rows[0])], *rows])
    try:
        columns, _ = delimited_rows(buffer.getvalue())
    except DataError as error:
        if "line" not in str(error):
            raise
        return
    assert list(columns) == NAMES[: len(rows[0])]
    assert [[value or "" for value in row] for row in zip(*columns.values(), strict=True)] == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("text;label;\nEin Satz;a;\nnoch;b;\n", [("Ein Satz", "a"), ("noch", "b")]),
        ("text,label\nt,a,\nu,b,\n", [("t", "a"), ("u", "b")]),
        ("text,label,,\nt,a,,\nu,b\n", [("t", "a"), ("u", "b")]),
        ("\n\ntext,label\n\nt,a\n\n", [("t", "a")]),
        ("text| label\na| b\n", [("a", "b")]),
        ('text,label\n"a, b", "c, d"\ne, "f"\n', [("a, b", "c, d"), ("e", "f")]),
        ("text,label\n  a,b \n", [("  a", "b ")]),
        ('text,label\na 5" nail,b\n', [('a 5" nail', "b")]),
        ("Text;Beschreibung, lang\neins, zwei;drei\n", [("eins, zwei", "drei")]),
        ('"text","label"\n"two\nlines, here","a"\n', [("two\nlines, here", "a")]),
    ],
)
def test_what_is_written_by_hand_and_by_spreadsheets(text: str, rows: list[tuple[str, ...]]) -> None:
    assert list(zip(*delimited_rows(text)[0].values(), strict=True)) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,label,site\nt,a,x,\nu,b,y\n", "line 2 has 4 fields, the heading .line 1. 3; quote texts that hold ','"),
        ("label;text\nx;one; two\ny;three; four\n", "line 2 has 3 fields, the heading .line 1. 2; quote .* ';'"),
        ("text,label\nt,a\nu\n", "line 3 has 1 fields, the heading .line 1. 2; quote"),
        ("# exported today\ntext,label\nt,a\n", "line 1 is a comment, not a heading"),
        ("Export of 2024\ntext;label\nt;a\n", "line 2 has 2 fields, .* 1; .* leave nothing above the heading"),
        ("text,label,text\na,b,c\n", "line 1 names two columns 'text'"),
        ("text,label,\na,b,\nc,d,e\n", "line 3 has 3 fields, the heading .line 1. 2"),
        ('label\ttext\na\t"great\nb\tbad"\n', "lines 2 to 3 are one row if their quotes enclose a text"),
        ('text,label\n"Hello" she said,a\n', "line 2: quotes or ends of lines"),
        ('text,label\nx,y\n"Hello she said,a\n', "line 3: quotes or ends of lines"),
        ("text,label\nx,y\rz,a\n", "line 2: quotes or ends of lines are odd"),
    ],
)
def test_rows_that_could_be_read_in_two_ways_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.csv").write_text(text, newline="")
    with pytest.raises(DataError, match=f"train.csv' {message}"):
        read_annotations(tmp_path / "train.csv")


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["250.10", "250.1"], ["250.10", "250.1"]),
        (["12345678901234567890123", "1"], ["12345678901234567890123", "1"]),
        (["007", "8"], ["007", "8"]),
        (["3.0", "3"], ["3.0", "3"]),
        (["-1.5", "3", "", "1e-05"], [-1.5, 3.0, None, 1e-05]),
        (["1", "", "-2"], [1, None, -2]),
        (["9007199254740993", "0.5"], ["9007199254740993", "0.5"]),
    ],
)
def test_a_column_is_of_numbers_if_they_are_written_so(tmp_path: Path, texts: list[str], values: list[Any]) -> None:
    (tmp_path / "t.csv").write_text("".join(f"{code},x\n" for code in ("code", *texts)))
    column = read_annotations(tmp_path / "t.csv")[0]["code"]
    assert column == values
    assert list(map(type, column)) == list(map(type, values))


def test_several_files_agree_on_what_is_a_number_and_null_is_not_a_float(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,code\na,1\nb,2\n")
    (tmp_path / "test.csv").write_text("text,code\nc,02\n")
    rows = Folder(path=str(tmp_path)).table("train", name="mine", data_dir=None)
    assert rows.read("code").to_pylist() == ["1", "2"]
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": null}\n')
    table = Folder(path=str(tmp_path / "t.jsonl"), fractions={}).table("train", name="mine", data_dir=None)
    assert str(table.type_of("label")) == "int64"


ODD = ["007", "00", "1e5", "NA", "null", "nan", "True", "2024-01-02", "0", "12", "café", "a\u2028b", "a\x85b", "x\x0cy"]
WORD = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=8),
)
TEXT = st.lists(WORD, min_size=1, max_size=4).map(" ".join).filter(lambda text: text.strip() == text and text != "")
ITEMS = st.lists(st.tuples(st.integers(0, 12), TEXT), min_size=1, max_size=5, unique_by=lambda item: item[0])
FORMS = {"end": st.sampled_from(["\n", "\r\n", "\r"]), "form": st.sampled_from(["NFC", "NFD"])}
WRITER = st.fixed_dictionaries({"bom": st.booleans(), "closed": st.booleans(), **FORMS})


def encoded(lines: list[str], writer: dict[str, Any]) -> bytes:
    text = writer["end"].join(lines) + (writer["end"] if writer["closed"] else "")
    return (b"\xef\xbb\xbf" if writer["bom"] else b"") + text.encode()


def name_of(number: int) -> str:
    return ["1.png", "001.png", "000000000001.png", "é.png", "b.JPG"][number % 5] if number < 5 else f"{number:05d}.png"


QUOTING = st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])


@given(ITEMS, WRITER, st.sampled_from([",", ";", "\t", "|"]), QUOTING, st.booleans())
def test_tables(
    tmp_path_factory: pytest.TempPathFactory, items: Any, writer: Any, delimiter: str, quoting: Any, lines: bool
) -> None:
    folder = tmp_path_factory.mktemp("table")
    buffer = io.StringIO(newline="")
    if lines:
        buffer.write(f"sep={delimiter}{writer['end']}")
    table = csv.writer(buffer, delimiter=delimiter, quoting=quoting, lineterminator=writer["end"])
    table.writerows([("file_name", "caption"), *((name_of(number), text) for number, text in items)])
    (folder / "CAPTIONS.CSV").write_bytes((b"\xef\xbb\xbf" if writer["bom"] else b"") + buffer.getvalue().encode())
    rows, _ = read_annotations(folder / "CAPTIONS.CSV")
    assert list(rows["file_name"]) == [name_of(number) for number, _ in items]
    assert list(rows["caption"]) == [text for _, text in items]


@given(ITEMS, WRITER)
def test_lines_of_objects_and_of_texts(tmp_path_factory: pytest.TempPathFactory, items: Any, writer: Any) -> None:
    folder = tmp_path_factory.mktemp("lines")
    writer = writer | ({"end": "\n"} if writer["end"] == "\r" else {})
    objects = [json.dumps({"file_name": name_of(k), "caption": text}, ensure_ascii=writer["bom"]) for k, text in items]
    (folder / "metadata.jsonl").write_bytes(encoded(objects, writer))
    rows, _ = read_annotations(folder / "metadata.jsonl")
    assert list(rows["caption"]) == [text for _, text in items]
    (folder / "texts.txt").write_bytes(encoded(["a first text", *(text for _, text in items)], writer))
    assert list(read_annotations(folder / "texts.txt")[0]["text"]) == ["a first text", *(text for _, text in items)]


@pytest.mark.parametrize(
    ("names", "called", "meant"),
    [
        (["001.png", "1.png"], "001", "001.png"),
        (["001.png", "1.png"], "1", "1.png"),
        (["000000000001.jpg"], "000000000001", "000000000001.jpg"),
        (["photo.JPG"], "photo.jpg", "photo.JPG"),
        (["photo.jpg", "photo.JPG"], "photo.JPG", "photo.JPG"),
        ([unicodedata.normalize("NFD", "é.png")], "é.png", unicodedata.normalize("NFD", "é.png")),
        (["é.png"], unicodedata.normalize("NFD", "é.png"), "é.png"),
        (["img/a.png"], "img\\a.png", "img/a.png"),
        (["img/a.png"], "./img/a.png", "img/a.png"),
        (["a.png"], " a.png ", "a.png"),
    ],
)
def test_names_of_images(tmp_path: Path, names: list[str], called: str, meant: str) -> None:
    folder = pictures(tmp_path / "data", *names)
    others = [name for name in names if name != meant]
    rows = [("file_name", "caption"), (called, "one"), *((name, "other") for name in others)]
    (folder / "captions.csv").write_text("".join(f'"{name}",{text}\n' for name, text in rows))
    table = Folder(path=str(folder)).content().rows.to_pydict()
    assert dict(zip(table["file_name"], table["caption"], strict=True))[meant] == "one"


def test_two_files_whose_names_are_alike_are_named(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "a.JPG", "a.jpg")
    (folder / "captions.csv").write_text("file_name,caption\na.Jpg,one\n")
    with pytest.raises(DataError, match=r"'a.Jpg' may be 'a.JPG' or 'a.jpg'"):
        Folder(path=str(folder)).content()


# ---- what cannot be read: one line, with a remedy


HOSTILE: dict[str, tuple[str, Any, str]] = {
    "utf-16 cut": ("captions.csv", "file_name,caption\na.png,ü\n".encode("utf-16")[:-1], "cannot be decoded as UTF-16"),
    "utf-16 bare": ("captions.csv", "file_name,caption\na.png,x\n".encode("utf-16-le"), "UTF-16 or UTF-32; save it"),
    "cyrillic": ("captions.csv", "file_name,caption\na.png,да\n".encode("cp1251"), "as Windows-1252 it would have"),
    "binary": ("captions.csv", b"file_name,caption\na.png,\0x\n", "no text at all, or UTF-16; save it as UTF-8"),
    "deep": ("captions.jsonl", b"[" * 100_000, "nested too deeply"),
    "list": ("captions.jsonl", b"[1]\n", "line 1 is a list, not an object"),
    "mixed": ("captions.jsonl", b'{"file_name": "a.png", "x": 1}\n{"file_name": "c.png", "x": "y"}\n', "several types"),
    "coco": ("dataset.json", b'{"images": ["xsentencesx"]}', "has no captions"),
    "coco list": ("dataset.json", b"[]", "cannot be read as captions of COCO"),
    "karpathy": ("dataset.json", b'{"images": [{"sentences": 3, "filename": "a.png"}]}', "cannot be read as captions"),
    "surrogate": ("captions.jsonl", b'{"file_name": "a.png", "caption": "\\ud800"}\n', "'caption' holds invalid texts"),
    "empty": ("captions.csv", b"", "has no rows"),
    "heading": ("captions.csv", b"file_name,caption\n", "has no rows"),
    "ragged": ("captions.csv", b"file_name,caption\na.png,x,y,z\nb.png,1\n1,2,3,4,5,6\n", "line 2 has 4 fields, the"),
    "quote": ("captions.csv", b'file_name,caption\na.png,"x\n', "captions.csv"),
    "pipe": ("captions.csv", os.mkfifo, "not that of a regular file"),
    "link out": ("captions.csv", lambda path: path.symlink_to("/etc/passwd"), "leaves the data set's folder"),
    "device": ("captions.csv", lambda path: path.symlink_to("/dev/zero"), "leaves the data set's folder"),
    "dangling": ("b.png", lambda path: path.symlink_to("nowhere"), "mend the link or remove it"),
    "loop": ("b.png", lambda path: path.symlink_to("b.png"), "mend the link or remove it"),
}


def hostile(folder: Path, name: str, content: Any) -> Path:
    pictures(folder, "a.png", "c.png", "d.png")
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        content(folder / name)
    return folder


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("command", [("prepare", "{}", "{}-out"), ("init", "x.yaml", "--pairs", "{}")], ids=" ".join)
def test_hostile_files_give_one_line(tmp_path: Path, cli: Any, case: str, command: tuple[str, ...]) -> None:
    name, content, reason = HOSTILE[case]
    folder = hostile(tmp_path / "data", name, content)
    code, _, errors = cli(*(part.replace("{}", str(folder)) for part in command))
    assert code == 2, errors
    assert reason in " ".join(errors.split())
    assert "Traceback" not in errors


def test_a_name_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "a.png")
    (folder / os.fsdecode(b"Gr\xfc\xdfe.png")).write_bytes((folder / "a.png").read_bytes())
    with pytest.raises(DataError, match=r"the name of 'Gr\\udcfc\\udcdfe.png' in .* is not UTF-8; rename it"):
        Folder(path=str(folder)).content()
