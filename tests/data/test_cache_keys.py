"""Keys of caches: two settings of a source with different rows, texts or files have different keys."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_mimic_cxr import Folder as MimicFolder

from polyfed.core.errors import DataError
from polyfed.core.settings import parse_settings
from polyfed.data.arrow import is_list
from polyfed.data.images import image_bytes
from polyfed.data.source import Source, Split
from polyfed.data.sources.memory import register_data

ROWS = {
    "id": [f"{row}" for row in range(8)],
    "text": ["one", "two", "three", "four", "five", "six", None, "eight"],
    "other": ["ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"],
    "many": [[f"a{row}", f"b{row}"] for row in range(8)],
    "label": [0, 1, 0, 1, 0, 1, 0, 1],
    "code": [3, 40, 3, 40, 3, 40, 3, 2_000_000],
    "fold": ["a", "a", "a", "b", "b", "b", "c", "c"],
    "questions": ["how many?", "what?", "how many?", "what?", "how many?", "what?", "why?", "why?"],
    "answers": ["2", "cat", "2", "dog", "1", "dog", "so", "so"],
}


def _image(path: Path, shade: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), shade).save(path)
    return path


def _tables(top: Path, write: Callable[[pa.Table, str], None]) -> None:
    table = pa.table(ROWS)
    for name, rows in (("train", table), ("validation", table[4:]), ("extra", table[::-1]), ("more", table[2:])):
        write(rows, str(top / name))


def _parquet(top: Path) -> None:
    (top / "site").mkdir()
    _tables(top / "site", lambda rows, name: pq.write_table(rows, f"{name}.parquet"))
    shutil.copytree(top / "site", top / "other")
    pq.write_table(pa.table(ROWS)[::-1], top / "other" / "train.parquet")


def _arrow(top: Path) -> None:
    (top / "site").mkdir()
    _tables(top / "site", lambda rows, name: pyarrow.feather.write_feather(rows, f"{name}.arrow", "uncompressed"))


def _folder(top: Path) -> None:
    for site in ("site", "other"):
        for row in range(8):
            _image(top / site / "images" / f"{row}.png", 10 * row + (site == "other"))
        for name, turn in (("captions", 0), ("letters", 3)):
            places, end = enumerate([*range(turn, 8), *range(turn)]), f"of {name} in {site}"
            lines = [f"{row}.png,{ROWS['fold'][row]},word {place} {end},{7 - row}.png" for place, row in places]
            (top / site / f"{name}.csv").write_text("\n".join(["image,fold,text,pair", *lines]))


def _memory(top: Path) -> None:
    register_data("cache-keys", {"train": pa.table(ROWS), "validation": pa.table(ROWS)[3:]})
    register_data("cache-keys-2", {"train": pa.table(ROWS)[::-1]})


def _mimic(top: Path) -> None:
    (top / "site").mkdir()
    MimicFolder(top / "site")


def _none(top: Path) -> None:
    """Generated data."""


CHOICES: dict[str, list[Any]] = {
    "where": [{"fold": "a"}, {"fold": ["a", "b"]}],
    "first": [{"train": 2}, {"train": 5}],
    "incomplete": ["leave_out", "keep"],
    "keep_first": [{"many": 1}],
    "fractions": [{"test": 0.25}, {"test": 0.5}, {"test": 0.25, "together": ["fold"]}],
}
ROLES: dict[str, list[Any]] = {
    "columns": [{"text": "other"}, {"text": ["text", "other"]}, {"text": ["other", "text"]}],
    "targets": [{"label": "code"}, {"label": "fold"}],
    "matches": ["label"],
    "max_rows": [100],
    "reading": [{"fold_labels": True}],
}
BASE = {"path": "site", "columns": {"text": "text"}, "targets": {"label": "label"}}
# source -> what makes its data, its settings, and other values of every field
SOURCES: dict[str, tuple[Callable[[Path], None], dict[str, Any], dict[str, list[Any]]]] = {
    "parquet": (
        _parquet,
        BASE,
        CHOICES
        | ROLES
        | {
            "path": ["site/train.parquet", "site/extra.parquet", "other"],
            "splits": [{"train": ["more"]}, {"train": ["train", "more"]}, {"train": ["more", "train"]}],
            "id": ["id"],
            "max_bytes": [1 << 20],
        },
    ),
    "arrow": (
        _arrow,
        BASE,
        CHOICES
        | ROLES
        | {"path": ["site/train.arrow", "site/extra.arrow"], "splits": [{"train": "more"}, {"train": "extra"}]}
        | {"id": ["id"], "max_bytes": [1 << 20]},
    ),
    "memory": (
        _memory,
        {name: value for name, value in BASE.items() if name != "path"} | {"data": "cache-keys"},
        CHOICES | ROLES | {"data": ["cache-keys-2"], "id": ["id"], "digest": []},
    ),
    "folder": (
        _folder,
        {"path": "site", "annotations": "captions.csv", "columns": {"image": "image", "text": "text"}},
        CHOICES
        | {
            "path": ["site/letters.csv", "other"],
            "annotations": ["letters.csv"],
            "file_column": ["pair"],
            "split_column": ["fold"],
            "reading": [{"encoding": "utf-16-le"}, {"encoding": "latin-1"}, {"decimal": ","}],
            "splits": [{"train": ["a"], "test": ["b", "c"]}, {"train": ["b"], "test": ["a", "c"]}],
            "keep_first": [],
            "columns": [{"image": "pair", "text": "text"}, {"text": ["text", "fold"]}],
            "targets": [{"label": "fold"}],
            "matches": ["fold"],
            "max_rows": [100],
        },
    ),
    "mimic_cxr": (
        _mimic,
        {"path": "site", "views": ["AP"]},
        {
            "path": [],
            "reports": [],
            "views": [["PA"], ["AP", "PA"], None],
            "sections": [["findings"], ["impression"], []],
            "without_sections": ["none"],
            "labels": ["positive"],
            "columns": [{"text": "text"}],
            "targets": [{"edema": "edema"}],
            "matches": [None],
            "where": [{"view": "AP"}],
            "first": [{"train": 3}],
            "incomplete": ["leave_out", "keep"],
            "keep_first": [],
        },
    ),
    "scenes": (
        _none,
        {"train": 6, "validation": 3, "test": 3, "size": 16},
        {
            **{"train": [7], "validation": [4], "test": [4], "size": [24], "seed": [1], "difficulty": [0.9]},
            **{"domain": ["night"], "shift": [0.5], "keep_first": [{"captions": 2}], "first": [{"train": 2}]},
            **{"where": [{"corners": 4}], "incomplete": ["leave_out"], "matches": ["topic"]},
            **{"columns": [{"text": "text"}, {"text": ["text", "colour"]}], "targets": [{"label": "topic"}]},
        },
    ),
    "questions": (
        _parquet,
        {"of": {"name": "parquet", "path": "site"}, "question": "questions", "answers": "answers", "most": 2},
        {
            "of": [{"name": "parquet", "path": "other"}, {"name": "parquet", "path": "site", "where": {"fold": "a"}}],
            "question": ["text"],
            "answers": ["fold"],
            "train_split": ["validation"],
            "most": [1, 3],
            "table": [["dog", "2"]],
            "several": [],
            "kinds": [[{"name": "number", "question": "^how many"}], [{"name": "what", "question": "^what"}]],
            "columns": [{"text": "other"}],
            "targets": [{"label": "fold"}],
        },
    ),
}
UNTESTED = {"hub": "downloads; its key holds repository, configuration, revision and what `datasets` knows it by"}


def _content(split: Split, column: str, folder: Path) -> list[Any]:
    """Values of a column, images as their bytes."""
    read = split.read(column)
    values = read.flat_values() if is_list(read.values.type) else read.values
    return [
        image_bytes(value, read.folder) if isinstance(value, dict) and value.keys() == {"bytes", "path"} else value
        for value in values.to_pylist()
    ]


def _opened(name: str, settings: dict[str, Any], split: str, top: Path) -> Split | None:
    source = parse_settings(Source.named(name), settings)
    try:
        return source.open(split, name="s", data_dir=top)
    except DataError:  # as fractions draw no split that is there
        return None


def test_every_source_and_every_field_has_other_values_here() -> None:
    assert SOURCES.keys() | UNTESTED.keys() == Source.declared().keys()
    for name, (_, _, others) in SOURCES.items():
        assert others.keys() == Source.named(name).model_fields.keys(), name


@pytest.mark.parametrize("name", SOURCES)
def test_settings_that_give_other_values_give_other_keys(name: str, tmp_path: Path) -> None:
    make, base, others = SOURCES[name]
    make(tmp_path)
    variants = [base, *(base | {field: value} for field, values in others.items() for value in values)]
    seen: dict[str, tuple[str, str]] = {}
    compared = 0
    for settings in variants:
        for split_name in ("train", "validation", "test"):
            if (split := _opened(name, settings, split_name, tmp_path)) is None:
                continue
            compared += 1
            for column in (*split.columns.values(), *split.targets.values()):
                key, content = split.read(column).fingerprint, repr(_content(split, column, tmp_path))
                about = json.dumps([split_name, column, settings])
                known, first = seen.setdefault(key, (content, about))
                assert content == known, f"one key, two contents: {first} and {about}"
    assert compared > len(variants)


# ---- files of equal names, sizes and times


def _equal(one: Path, other: Path) -> None:
    """Give a file the times of another."""
    status = one.stat()
    assert status.st_size == other.stat().st_size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))


def _keys(source: dict[str, Any], top: Path) -> dict[str, str]:
    split = _opened(source["name"], {key: value for key, value in source.items() if key != "name"}, "train", top)
    assert split is not None
    return {column: split.read(column).fingerprint for column in split.columns.values()}


def _site(top: Path, shade: int, word: str) -> None:
    for row in range(3):
        path = top / f"{row}.bmp"
        _image(path, shade + row)
        os.utime(path, ns=(1, 1))
    (top / "captions.csv").write_text("\n".join(["image,text", *(f"{row}.bmp,{word} {row}" for row in range(3))]))
    os.utime(top / "captions.csv", ns=(1, 1))


SITE = {"name": "folder", "columns": {"image": "image", "text": "text"}, "fractions": {}}


def test_two_sites_of_equal_names_sizes_and_times_share_no_key_even_at_one_place(tmp_path: Path) -> None:
    _site(tmp_path / "north", 10, "lung")
    _site(tmp_path / "south", 90, "hand")
    north, south = ({*_keys({**SITE, "path": site}, tmp_path).values()} for site in ("north", "south"))
    assert not north & south
    # nor if one takes the place of the other
    shutil.rmtree(tmp_path / "north")
    (tmp_path / "south").rename(tmp_path / "north")
    assert not north & {*_keys({**SITE, "path": "north"}, tmp_path).values()}


def test_equal_texts_share_a_key_wherever_they_lie(tmp_path: Path) -> None:
    _site(tmp_path / "north", 10, "lung")
    shutil.copytree(tmp_path / "north", tmp_path / "copy")
    assert _keys({**SITE, "path": "north"}, tmp_path)["text"] == _keys({**SITE, "path": "copy"}, tmp_path)["text"]


@pytest.mark.parametrize("name", ["parquet", "arrow", "memory"])
def test_an_image_that_a_row_names_is_part_of_the_key(tmp_path: Path, name: str) -> None:
    image, other = _image(tmp_path / "site" / "x.bmp", 10), _image(tmp_path / "y.bmp", 200)
    shown = image if name == "memory" else Path("x.bmp")
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array([{"bytes": None, "path": str(shown)}], struct)})
    source: dict[str, Any] = {"name": name, "path": "site", "columns": {"image": "image"}}
    if name == "parquet":
        pq.write_table(table, tmp_path / "site" / "train.parquet")
    elif name == "arrow":
        pyarrow.feather.write_feather(table, str(tmp_path / "site" / "train.arrow"), "uncompressed")
    else:
        register_data("cache-keys-image", {"train": table})
        source = {"name": name, "data": "cache-keys-image", "columns": {"image": "image"}}
    before = _keys(source, tmp_path)
    _equal(image, other)
    other.replace(image)
    assert before != _keys(source, tmp_path)


def test_numbers_of_classes_that_other_splits_decide_are_part_of_the_key(tmp_path: Path) -> None:
    keys = []
    for codes in ([3, 2_000_000], [3, 20, 2_000_000]):
        (tmp_path / "site").mkdir(exist_ok=True)
        source = {"path": "site", "columns": {"text": "text"}, "targets": {"label": "code"}}
        if not keys:
            pq.write_table(pa.table({"text": ["a", "b"], "code": [3, 40]}), tmp_path / "site" / "train.parquet")
        pq.write_table(pa.table({"text": ["c"] * len(codes), "code": codes}), tmp_path / "site" / "test.parquet")
        split = _opened("parquet", source, "train", tmp_path)
        assert split is not None
        keys.append((split.read("code").fingerprint, split.read("code").values.to_pylist()))
    (one, first), (other, second) = keys
    assert (first, second) == ([0, 1], [0, 2])
    assert one != other


def test_columns_in_brackets_share_no_key_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    pq.write_table(pa.table({"a, b": [1], "c": [2], "a": [3], "b, c": [4]}), tmp_path / "site" / "train.parquet")
    source = {"name": "parquet", "path": "site"}
    tables = ({"table": ["a, b", "c"]}, {"table": ["a", "b, c"]})
    keys = [_keys(source | {"columns": columns}, tmp_path)["[a, b, c]"] for columns in tables]
    assert keys[0] != keys[1]
