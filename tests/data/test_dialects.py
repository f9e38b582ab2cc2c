"""Tables of any country are read as they are meant, or refused with the setting that decides; dialects as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polyfed.core.errors import DataError
from polyfed.data.dialects import Dialect, Rows, decoded, is_numeric_text, looks_missing
from polyfed.data.files import read_annotations
from polyfed.data.sources.folder import Folder

COUNTRIES = {  # delimiter, decimal sign, sign between thousands
    "Germany": (";", ",", "."),
    "France": ("\t", ",", "\xa0"),
    "Norway": (";", ",", " "),
    "Switzerland": (";", ".", "'"),
    "England": (",", ".", ","),
    "Python": (",", ".", ""),
}


def read(folder: Path, content: str | bytes, **settings: Any) -> tuple[Rows, Dialect]:
    (folder / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_annotations(folder / "t.csv", **settings)


def one_column(folder: Path, cells: Sequence[str], next: str = "6,5", **settings: Any) -> list[Any]:
    rows = "".join(f"{cell};{next}\n" for cell in cells)
    return list(read(folder, f"x;next\n{rows}", **settings)[0]["x"])


@given(
    st.lists(st.tuples(st.integers(-(10**8), 10**8), st.integers(-(10**6), 10**6)), min_size=1, max_size=8),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32", "windows-1252"]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_numbers_are_equal_in_whatever_country_they_are_written(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[tuple[int, int]], encoding: str, end: str
) -> None:
    folder = tmp_path_factory.mktemp("countries")
    for delimiter, decimal, group in COUNTRIES.values():
        lines = [delimiter.join(("Größe", "Anzahl", "Befund"))]
        for hundredths, complete in numbers:
            writing = str.maketrans({",": group, ".": decimal})
            cells = (f"{hundredths / 100:,.2f}".translate(writing), f"{complete:,}".translate(writing), "weiß;\t,")
            lines.append(delimiter.join(f'"{cell}"' for cell in cells))
        rows, dialect = read(folder, end.join(lines).encode(encoding))
        assert rows["Größe"] == [hundredths / 100 for hundredths, _ in numbers]
        assert rows["Anzahl"] == [complete for _, complete in numbers]
        assert (dialect.delimiter, dialect.decimal, dialect.rows) == (delimiter, decimal, len(numbers))


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["6,5", "6,50", "-0,25", "−3", "+1,5"], [6.5, 6.5, -0.25, -3.0, 1.5]),
        (["1.234,5", "12.345.678,00"], [1234.5, 12345678.0]),
        (["1,5e-3", "2,25E+03", "1,5e3"], [0.0015, 2250.0, 1500.0]),
        (["1.234", "5"], [1234, 5]),
        ([",5", " 7 "], [0.5, 7.0]),
        (["1'234,5", "7"], [1234.5, 7.0]),
        (["1\u202f234", "7"], [1234, 7]),
        (["5", "k.A.", "-", "NA", "n/a", ".", "NaN", "null"], [5, *(None,) * 7]),
        (["k.A.", "-"], None),
        (["007", "008"], None),
        (["01.02.2024", "24.12.2024"], None),
        (["1.2", "24.12"], None),
        (["602 123 456", "603 123 456"], None),
        (["+491721234567", "+491721234568"], None),
        (["12:30", "1:05"], None),
        (["5 mg", "10 mg"], None),
        (["5 %", "6 %"], None),
        (["3,50 €", "4,00 €"], None),
        (["1.234,5", "1'234,5"], None),
        (["1.23,5", "2,5"], None),
    ],
)
def test_columns_where_decimals_have_commas(tmp_path: Path, cells: list[str], numbers: list[Any] | None) -> None:
    column = one_column(tmp_path, cells)
    assert column == (cells if numbers is None else numbers)
    assert numbers is None or list(map(type, column)) == list(map(type, numbers))


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["6.50", "12.00"], [6.5, 12.0]),
        (["1,234.50", "2.5"], [1234.5, 2.5]),
        (["250.10", "250.11", "401.9"], ["250.10", "250.11", "401.9"]),
    ],
)
def test_columns_where_decimals_have_points(tmp_path: Path, cells: list[str], numbers: list[Any]) -> None:
    assert one_column(tmp_path, cells, next="0.25") == numbers


def test_a_sign_that_may_be_meant_in_two_ways_is_settled_by_the_file_or_a_setting(tmp_path: Path) -> None:
    for next, numbers in (("6,5", [1234, 5678]), ("0.5", [1.234, 5.678])):
        assert one_column(tmp_path, ["1.234", "5.678"], next) == numbers
    with pytest.raises(DataError, match=r"t.csv' '1.234' in 'x' may be 1.234 or 1234; give the sign .*decimal: "):
        one_column(tmp_path, ["1.234"], "a")
    assert one_column(tmp_path, ["1.100", "999"], "a") == [1100, 999]
    assert one_column(tmp_path, ["1.234"], "a", decimal=",") == [1234]
    assert one_column(tmp_path, ["1.234"], "a", decimal=".") == [1.234]
    with pytest.raises(DataError, match=r"has '6,5' in 'next' and '0.75' in 'x'; give the sign .*decimal: "):
        one_column(tmp_path, ["0.75"])
    assert one_column(tmp_path, ["0.75"], decimal=".") == [0.75]


def test_dialects_describe_themselves(tmp_path: Path) -> None:
    text = "Größe, cm;CRP, mg/l;Dosis\n180,5;6,5;5\n170,0;k.A.;>200\n171,0;k.A.;6\n"
    _, dialect = read(tmp_path, text.encode("windows-1252"))
    parts = ["Windows-1252 (as in 'Größe'), ';' between fields, ',' as decimal point, 3 rows"]
    parts += ["2 'k.A.' in 'CRP, mg/l' read as missing", "'Dosis' is not a column of numbers, as it has '>200'"]
    assert str(dialect) == "; ".join(parts)
    assert str(read(tmp_path, "text\tlabel\na\t1\n")[1]) == "UTF-8, tab between fields, 1 row"


@pytest.mark.parametrize(
    ("cells", "odd"),
    [
        (["6,5", "7,25", "siehe Brief"], "siehe Brief"),
        (["6,5", "7,25", "<0,5"], "<0,5"),
        (["6.5", "7.25", "<0.5"], "<0.5"),
        (["6,5", "7,25", "8", "0.75"], "0.75"),
        (["65,6%", "42,7%"], "65,6%"),
        (["1,83 €", "2,92 €"], "1,83 €"),
        (["01.02.2024", "24.12."], None),
        (["5a", "6b"], None),
    ],
)
def test_a_column_of_numbers_that_has_an_odd_value_names_it(tmp_path: Path, cells: list[str], odd: str | None) -> None:
    for delimiter in (";", ","):
        rows, dialect = read(tmp_path, f"n{delimiter}x\n" + "".join(f'5{delimiter}"{cell}"\n' for cell in cells))
        assert rows["x"] == cells
        assert dialect.mixed == ({"x": odd} if odd else {})


def test_a_mixed_column_decides_the_decimal_sign_if_others_do_not(tmp_path: Path) -> None:
    table = "x;y\n1.234;{}\n5.678;{}\n2.345;odd\n"
    assert read(tmp_path, table.format("6,5", "7,5"))[0]["x"] == [1234, 5678, 2345]
    assert read(tmp_path, table.format("6.5", "7.5"))[0]["x"] == [1.234, 5.678, 2.345]
    assert read(tmp_path, 'x,y\n"1,234","6,5"\n"5,678","7,5"\n"2,345",odd\n')[0]["x"] == [1234, 5678, 2345]


@pytest.mark.parametrize("comma", ["6,5", "1,2345"])
def test_commas_and_points_before_decimals_are_refused_whatever_is_between_fields(tmp_path: Path, comma: str) -> None:
    for delimiter in (";", ","):
        with pytest.raises(DataError, match=f"has '{comma}' in 'x' and '0.75' in 'y'; give the sign .*decimal: "):
            read(tmp_path, f'x{delimiter}y\n3{delimiter}1\n"{comma}"{delimiter}0.75\n')
    assert read(tmp_path, 'x,y\n3,1\n"1,234",0.75\n')[0]["x"] == [3, 1234]
    assert read(tmp_path, 'x,y\n1\'234,1\n"1,234",0.75\n')[0]["x"] == ["1'234", "1,234"]


def test_codes_of_several_files_stay_as_they_are_written(tmp_path: Path) -> None:
    for split, codes in (("train", ("250.10", "250.11")), ("test", ("250.1", "401.9"))):
        (tmp_path / f"{split}.csv").write_text("".join(f"{one},x\n" for one in ("code", *codes)).replace("e,x", "e,y"))
    rows = Folder(path=str(tmp_path)).content().rows
    assert sorted(rows["code"].to_pylist()) == ["250.1", "250.10", "250.11", "401.9"]


WESTERN = [
    *("schön, süße Füße für „Übung“ – 5 µg, 38 °C", "à l’hôpital, très cœur naïf, œdème, théâtre, déçu, été"),
    *("¿Qué niño? compañía, vergüenza, Á. García", "informação, lições, mãe, às"),
    *("città perché più lunedì è", "blåbær på øl, Ærø"),
]
OTHERS = [
    *[("windows-1251", text) for text in ("Привет", "да\nне", "м\nж")],
    *[("koi8-r", "нет"), ("windows-1253", "ναι"), ("windows-1254", "kırmızı"), ("windows-1250", "člověk příliš")],
    *[("windows-1250", text) for text in ("święto człowiek", "erdő", "kuća")],
    *[("gbk", text) for text in ("男\n女", "狗", "中文")],
    *[("shift_jis", "はい"), ("shift_jis", "犬"), ("euc-kr", "남\n여"), ("big5", "狗"), ("iso-2022-jp", "日本語")],
    *[("windows-1255", "שלום"), ("windows-1257", "ąžuolas"), ("mac_roman", "schöne Grüße"), ("cp850", "Größe")],
    ("utf-16-le", "plain"),
]


@pytest.mark.parametrize("text", WESTERN)
def test_western_texts_need_no_setting(text: str) -> None:
    assert decoded(text.encode("windows-1252"))[0] == text


@pytest.mark.parametrize(("encoding", "text"), OTHERS)
def test_other_texts_are_refused_with_the_setting_that_reads_them(tmp_path: Path, encoding: str, text: str) -> None:
    content = f"id;text\n1;{text}\n".encode(encoding)
    with pytest.raises(DataError, match=r"t.csv' is n.*; save it as UTF-8, or name its encoding in reading"):
        read(tmp_path, content)
    rows, dialect = read(tmp_path, f'id;text\n1;"{text}"\n'.encode(encoding), encoding=encoding)
    assert (rows["text"], dialect.encoding) == ([text], encoding)


def test_a_file_of_two_encodings_and_a_codec_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="as Windows-1252 it would have"):
        read(tmp_path, "text;x\nmüde;1\n".encode() + "müde;2\n".encode("latin-1"))
    for codec in ("nonsense", "rot13"):
        with pytest.raises(DataError, match=f"encoding '{codec}'; write a codec of Python, such as utf-8"):
            read(tmp_path, "a;b\n1;2\n", encoding=codec)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('text,label\n"two, lines\nhere",a\nx,b\n', [("two, lines\nhere", "a"), ("x", "b")]),
        ('"label"\t"text"\n"a"\t"one\nb\ttwo"\n', [("a", "one\nb\ttwo")]),
        ('label;text\r\na;"one\nb;two"\r\nc;d\r\n', [("a", "one\nb;two"), ("c", "d")]),
        ('label,text\na,"one\nb,""two"""\n', [("a", 'one\nb,"two"')]),
    ],
)
def test_lines_in_quotes_are_one_row_where_signs_allow(tmp_path: Path, text: str, rows: list[Any]) -> None:
    columns, _ = read(tmp_path, text)
    assert list(zip(*columns.values(), strict=True)) == rows


FILES = ("bilder/a.png", "bilder/b.png", "masken/a.png", "masken/b.png")


@pytest.mark.parametrize(
    ("heading", "rows", "result"),
    [
        ("datei,befund", ["a.png,x", "b.PNG,y"], "datei"),
        ("befund,stamm", ["x,a", "y,b"], "stamm"),
        ("ziel,quelle", ["masken/a.png,bilder/a.png", "masken/b.png,bilder/b.png"], "quelle"),
        ("maske,bild", ["a.png,b.png", "b.png,a.png"], "bild"),
        ("scan,image", ["a.png,b.png", "b.png,a.png"], "image"),
        ("image,scan", ["CT,a.png", "MR,b.png"], "scan"),
        ("nr,grad", ["1,3", "2,4"], None),
        ("alter,datei", ["3,a.png", "4,b.png"], "datei"),
        ("alter", [*map(str, range(9)), "> 90"], None),
        ("nummer", [f"00{k}" for k in range(9)], None),
    ],
)
def test_a_column_of_file_names_is_found_by_its_content(
    tmp_path: Path, heading: str, rows: list[str], result: str | None
) -> None:
    files = (*FILES, *(f"{k}.png" for k in range(9)), *(f"00{k}.png" for k in range(9)))
    columns, _ = read(tmp_path, "\n".join((heading, *rows)), files=files)
    assert [name for name in heading.split(",") if name not in columns] == ([result] if result else [])


def test_two_columns_that_may_name_the_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"columns vorn, seite name files of the folder; give .* file_column"):
        read(tmp_path, "vorn,seite\na.png,b.png\n", files=("a.png", "b.png"))


def test_a_folder_needs_no_setting_for_its_table(tmp_path: Path) -> None:
    for number in (1, 2):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    text = "Nr;Datei;Größe;Befund\n2;1.png;6,5;weiß\n1;2.png;7,25;grün\n"
    (tmp_path / "tabelle.csv").write_bytes(text.encode("windows-1252"))
    rows = Folder(path=str(tmp_path)).content().rows.to_pydict()
    assert (rows["file_name"], rows["Größe"], rows["Befund"]) == (["1.png", "2.png"], [6.5, 7.25], ["weiß", "grün"])
    assert rows["Nr"] == [2, 1]


@pytest.mark.parametrize(
    ("cells", "is_numeric"),
    [
        (["6,5", "1.234,5", None], True),
        (["01.02.2024", "-"], True),
        (["+49 172/123", "12:30", "5 %", "1,5e-3"], True),
        (["6,5", "ohne Befund"], False),
        (["0 mg/l", "5,9 mg/l", "k.A."], True),
        (["37 °C", "< 5 %", "90 ml/min/1,73 m²"], True),
        (["C0.0", "I21.9", "P-001"], True),
        (["12:30 Uhr", "12 Jan 2024"], True),
        (["5 mg", "ohne Befund"], False),
        (["2 dogs run on grass", "3 cats sleep"], False),
        (["C0.0", "Befund"], False),
        (["3只狗坐在草地上"], False),
        (["男", "3"], False),
        ([None, "-"], False),
    ],
)
def test_numbers_and_dates_are_not_texts(cells: list[str | None], is_numeric: bool) -> None:
    assert is_numeric_text(cells) == is_numeric


@pytest.mark.parametrize(
    ("value", "is_missing"), [("NA", True), (" k.A. ", True), ("-", True), ("", True), ("0", False), ("nein", False)]
)
def test_marks_of_missing_cells_are_known(value: str, is_missing: bool) -> None:
    assert looks_missing(value) == is_missing
