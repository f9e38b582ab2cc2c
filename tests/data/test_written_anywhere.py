"""Text files give exactly the items that their author meant, whatever system and program wrote them."""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polyfed.core.errors import DataError
from polyfed.data.files import read_annotations
from polyfed.data.sources.folder import Folder

ODD = ["007", "00", "1e5", "NA", "null", "nan", "True", "2024-01-02", "0", "12", "café", "a\u2028b", "a\x85b", "x\x0cy"]
WORD = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1, max_size=8),
)
TEXT = st.lists(WORD, min_size=1, max_size=4).map(" ".join).filter(lambda text: text.strip() == text and text != "")
ITEMS = st.lists(st.tuples(st.integers(0, 12), TEXT), min_size=1, max_size=5, unique_by=lambda item: item[0])
WRITER = st.fixed_dictionaries(
    {
        "bom": st.booleans(),
        "end": st.sampled_from(["\n", "\r\n", "\r"]),
        "closed": st.booleans(),
        "form": st.sampled_from(["NFC", "NFD"]),
    }
)


def encoded(lines: list[str], writer: dict[str, Any]) -> bytes:
    text = writer["end"].join(lines) + (writer["end"] if writer["closed"] else "")
    return (b"\xef\xbb\xbf" if writer["bom"] else b"") + text.encode()


def name_of(number: int) -> str:
    return ["1.png", "001.png", "000000000001.png", "é.png", "b.JPG"][number % 5] if number < 5 else f"{number:05d}.png"


@given(
    ITEMS,
    WRITER,
    st.sampled_from([",", ";", "\t", "|"]),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    st.booleans(),
)
def test_tables(
    tmp_path_factory: pytest.TempPathFactory, items: Any, writer: Any, delimiter: str, quoting: Any, told: bool
) -> None:
    folder = tmp_path_factory.mktemp("table")
    buffer = io.StringIO(newline="")
    if told:
        buffer.write(f"sep={delimiter}{writer['end']}")
    table = csv.writer(buffer, delimiter=delimiter, quoting=quoting, lineterminator=writer["end"])
    table.writerows([("file_name", "caption"), *((name_of(number), text) for number, text in items)])
    (folder / "CAPTIONS.CSV").write_bytes((b"\xef\xbb\xbf" if writer["bom"] else b"") + buffer.getvalue().encode())
    rows = read_annotations(folder / "CAPTIONS.CSV")
    assert list(rows["file_name"]) == [name_of(number) for number, _ in items]
    assert list(rows["caption"]) == [text for _, text in items]


@given(ITEMS, WRITER)
def test_lines_of_objects_and_of_texts(tmp_path_factory: pytest.TempPathFactory, items: Any, writer: Any) -> None:
    folder = tmp_path_factory.mktemp("lines")
    writer = writer | ({"end": "\n"} if writer["end"] == "\r" else {})
    objects = [json.dumps({"file_name": name_of(k), "caption": text}, ensure_ascii=writer["bom"]) for k, text in items]
    (folder / "metadata.jsonl").write_bytes(encoded(objects, writer))
    rows = read_annotations(folder / "metadata.jsonl")
    assert list(rows["caption"]) == [text for _, text in items]
    (folder / "texts.txt").write_bytes(encoded(["a first text", *(text for _, text in items)], writer))
    assert list(read_annotations(folder / "texts.txt")["text"]) == ["a first text", *(text for _, text in items)]
    tokens = [f"{name_of(k)}#{k}\t{text}" for k, text in items]
    (folder / "results.token").write_bytes(encoded(tokens, writer))
    rows = read_annotations(folder / "results.token")
    assert list(zip(rows["file_name"], rows["captions"], strict=True)) == [(name_of(k), text) for k, text in items]


def pictures(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(folder / name, "PNG")
    return folder


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
def test_names_of_pictures(tmp_path: Path, names: list[str], called: str, meant: str) -> None:
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


def fifo(path: Path) -> None:
    os.mkfifo(path)


_MIXED = "".join(
    json.dumps({"file_name": f"{name}.png", "x": value}) + "\n"
    for name, value in zip("acd", (1, "y", "z"), strict=True)
)
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "utf-16": ("captions.csv", "file_name,caption\na.png,ü\n".encode("utf-16"), "looks like UTF-16; save it as UTF-8"),
    "utf-16 bare": ("captions.csv", "file_name,caption\na.png,x\n".encode("utf-16-le"), "UTF-16 or UTF-32; save it"),
    "utf-32": ("captions.csv", "file_name,caption\na.png,ü\n".encode("utf-32"), "looks like UTF-32; save it as UTF-8"),
    "latin-1": (
        "captions.csv",
        "file_name,caption\na.png,ü\n".encode("latin-1"),
        "such as Windows-1252; save it as",
    ),
    "binary": ("captions.csv", b"file_name,caption\na.png,\0x\n", "no text at all, or UTF-16; save it as UTF-8"),
    "deep": ("captions.jsonl", b"[" * 100_000, "nested too deeply"),
    "list": ("captions.jsonl", b"[1]\n", "line 1 is a list, not an object"),
    "mixed": (
        "captions.jsonl",
        b'{"file_name": "a.png", "x": 1}\n{"file_name": "c.png", "x": "y"}\n{"file_name": "d.png", "x": "y"}\n',
        "several types",
    ),
    "coco": ("dataset.json", b'{"images": ["xsentencesx"]}', "has no captions"),
    "coco list": ("dataset.json", b"[]", "cannot be read as captions of COCO"),
    "karpathy": ("dataset.json", b'{"images": [{"sentences": 3, "filename": "a.png"}]}', "cannot be read as captions"),
    "surrogate": (
        "captions.jsonl",
        b'{"file_name": "a.png", "caption": "\\ud800"}\n',
        "column 'caption' holds no text",
    ),
    "empty": ("captions.csv", b"", "has no rows"),
    "heading": ("captions.csv", b"file_name,caption\n", "has no rows"),
    "ragged": (
        "captions.csv",
        b"file_name,caption\na.png,x,y,z\nb.png,1\n1,2,3,4,5,6\n",
        "line 2 has 4 fields, the heading (line 1) 2",
    ),
    "quote": ("captions.csv", b'file_name,caption\na.png,"x\n', "captions.csv"),
    "pipe": ("captions.csv", fifo, "not that of a regular file"),
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
