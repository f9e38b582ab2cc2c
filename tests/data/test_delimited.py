"""Delimited tables: every row as it was written, or an error with its line; what becomes numbers."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyfed.core.errors import DataError
from polyfed.data.files import delimited_rows, read_annotations
from polyfed.data.sources.folder import Folder

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
def test_what_a_writer_wrote_comes_back_or_a_line_is_named(
    rows: list[list[str]], delimiter: str, quoting: Any, end: str
) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, quoting=quoting, lineterminator=end)
    writer.writerows([NAMES[: len(rows[0])], *rows])
    try:
        columns = delimited_rows(buffer.getvalue())
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
    assert list(zip(*delimited_rows(text).values(), strict=True)) == rows


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
        ('label\ttext\na\t"great\nb\tbad"\n', "lines 2 to 3 are one row or"),
        ('text,label\n"Hello" she said,a\n', "line 2: quotes or ends of lines"),
        ('text,label\nx,y\n"Hello she said,a\n', "line 3: quotes or ends of lines"),
        ("text,label\nx,y\rz,a\n", "line 2: quotes or ends of lines are odd"),
    ],
)
def test_rows_that_could_be_read_in_two_ways_are_refused_with_file_and_line(
    tmp_path: Path, text: str, message: str
) -> None:
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
def test_a_column_is_of_numbers_if_these_are_written_as_it_stands(
    tmp_path: Path, texts: list[str], values: list[Any]
) -> None:
    (tmp_path / "t.csv").write_text("".join(f"{code},x\n" for code in ("code", *texts)))
    column = read_annotations(tmp_path / "t.csv")["code"]
    assert column == values
    assert list(map(type, column)) == list(map(type, values))


def test_several_files_agree_on_what_is_a_number_and_null_is_no_float(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,code\na,1\nb,2\n")
    (tmp_path / "test.csv").write_text("text,code\nc,02\n")
    rows = Folder(path=str(tmp_path)).table("train", name="mine", data_dir=None)
    assert rows.read("code").to_pylist() == ["1", "2"]
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": null}\n')
    table = Folder(path=str(tmp_path / "t.jsonl"), fractions={}).table("train", name="mine", data_dir=None)
    assert str(table.type_of("label")) == "int64"
