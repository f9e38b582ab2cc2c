"""Folders as people have them: everything is accounted for, two meanings are refused, decisions have reasons."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import zoo
from polyfed.core.errors import DataError
from polyfed.data.sources.folder import Folder
from polyfed.reporting.run_tables import recorded_accounts
from polyfed.runs.experiment import Experiment
from polyfed.runs.starter import StarterSource

Cli = Callable[..., tuple[int, str, str]]
SPLITS = ("train", "validation", "test")


def looked_at(name: str, top: Path, **reported: Any) -> StarterSource:
    purpose, make, file = zoo.FOLDERS[name]
    make(top)
    return StarterSource.of(purpose, top / file, reported)


def parts(file: str | Path, source: str, *splits: str) -> list[Any]:
    """Splits of a source of an experiment."""
    opened = Experiment.load(file).data.sources[source]
    return [opened.open(split, name="s", data_dir=None) for split in splits or SPLITS]


@pytest.mark.parametrize("name", zoo.FOLDERS)
def test_all_that_is_found_is_read_or_left_out_with_a_reason(name: str, tmp_path: Path) -> None:
    top = tmp_path / "data"
    source = looked_at(name, top, **({"incomplete": "leave_out"} if name == "captions" else {}))
    counts = {count.unit: count for count in source.counts}
    assert all(count.adds_up for count in counts.values()), counts
    if not zoo.FOLDERS[name][2]:
        assert counts["files"].total == zoo.files_in(top)
    columns = {column for table in source.tables.values() for column in table.schema.names}
    assert counts["columns"].total == len(columns) == len(source.sample)


def test_reasons_name_what_is_left_out(tmp_path: Path) -> None:
    assert [line.strip() for count in looked_at("classes", tmp_path).counts for line in count.lines()][:4] == [
        "files: 46 found, 40 read",
        "left out: 1 .dcm files, which are not read (`dcmj2pnm --write-png --min-max-window 1.dcm 1.png` (DCMTK))",
        "left out: 2 hidden files, such as '.DS_Store'",
        "left out: 3 files of operating systems, such as '@eaDir/0.png/thumb.jpg'",
    ]
    labels = StarterSource.of("pictures", tmp_path).tables["train"].read("label").to_pylist()
    assert {*labels} == {"a", "b"}, "thumbnails are no class"


def test_rows_without_their_image_are_counted(tmp_path: Path) -> None:
    zoo.captions(tmp_path)
    counts = Folder(path=str(tmp_path), incomplete="leave_out").account(name="s", data_dir=None)
    rows = next(count for count in counts if count.unit == "rows")
    assert (rows.total, rows.read, rows.left_out[0].count) == (40, 30, 10)


def test_a_dry_run_and_a_run_list_what_was_read_and_what_is_cut(cli: Cli) -> None:
    zoo.texts(Path("data"))
    assert cli("init", "mine.yaml", "--texts", "data/news.csv", "--clients", 2, "--rounds", 1)[0] == 0
    content = yaml.safe_load(Path("mine.yaml").read_text())
    view = content["clients"]["texts"]["model"]["encoders"]["text"]["view"]
    assert view["length"] == 64, "the telling word is the 60th, the longest text has 61"
    assert content["data"]["sources"]["texts"]["path"] == "data/news.csv"
    shorter = ["--set", "clients.texts.model.encoders.text.view.length=32"]
    code, out, _ = cli("run", "mine.yaml", "--dry-run", *shorter, "--set", "clients.texts.items=20")
    assert code == 0
    assert "held by no participant" in " ".join(out.split()), out
    assert all(words in " ".join(out.split()) for words in ("without label", "cut off"))
    code, _, err = cli("run", "mine.yaml", "--out", "run", "--set", "run.output.plots=false", *shorter)
    assert (code, "longer than 32; the longest has 61" in err) == (0, True)
    (table,) = recorded_accounts(Path("run"))
    seen, read, reason = {row[0]: row[1:] for row in table.rows}["texts: tokens (text)"]
    assert int(seen.replace(",", "")) > int(read.replace(",", ""))
    assert "longer than 32" in reason


def test_decisions_are_printed_with_their_reasons(cli: Cli) -> None:
    zoo.two_splits(Path("data"))
    code, out, _ = cli("init", "mine.yaml", "--pictures", "data")
    assert code == 0
    assert "splits: 10% of the training items drawn for test, as the data only have validation" in out
    assert "12 equal items of column 'image' are in two splits, such as" in out
    assert "method: fedavg, as there is no public set; --public FOLDER gives one" in out
    assert [len(part) for part in parts("mine.yaml", "pictures")] == [43, 12, 5]


def test_nothing_private_becomes_public_without_an_option(cli: Cli) -> None:
    zoo.captions(Path("data"))
    zoo.beside(Path("open"))
    given = ("--pairs", "data", "--annotations", "captions.csv", "--clients", 1)
    (Path("data") / "captions.csv").write_text(
        "\n".join(["file_name,caption", *(f"images/{number}.jpg,thing {number}" for number in range(30))])
    )
    assert cli("init", "private.yaml", *given)[0] == 0
    assert "public" not in yaml.safe_load(Path("private.yaml").read_text())
    code, out, _ = cli("init", "open.yaml", *given, "--public", "open")
    assert (code, "method: change_distillation, as 30 pairs are public" in out) == (0, True)
    assert yaml.safe_load(Path("open.yaml").read_text())["public"] == {"source": "public"}
    assert len(parts("open.yaml", "public", "train")[0]) == 30
    code, out, _ = cli("init", "share.yaml", *given, "--public-share", 0.5)
    assert (code, "12 of the pairs, visible to all participants" in out) == (0, True)
    for wrong, words in (
        (("--public", "open", "--public-share", 0.5), "exclude each other"),
        (("--public-share", 0.5, "--method", "fedavg"), "uses no public set"),
    ):
        code, _, err = cli("init", "wrong.yaml", *given, *wrong)
        assert (code, words in err, Path("wrong.yaml").exists()) == (2, True, False)


def test_patients_stay_in_one_split_if_asked_and_are_warned_of_if_not(cli: Cli) -> None:
    for number in range(120):
        zoo.image(Path("data") / f"{number}.png", number)
    rows = [f"{number}.png,{'ab'[number // 4 % 2]},p{number // 4}" for number in range(120)]
    (Path("data") / "labels.csv").write_text("\n".join(["file_name,label,patient_id", *rows]))
    code, out, _ = cli("init", "mixed.yaml", "--pictures", "data", "--clients", 1)
    assert (code, "'patient_id' has 30 values in 120 rows" in out, "--together patient_id" in out) == (0, True, True)
    code, out, _ = cli("init", "apart.yaml", "--pictures", "data", "--clients", 1, "--together", "patient_id")
    assert (code, "--together" in out) == (0, False)
    patients = [{*part.read("patient_id").values.to_pylist()} for part in parts("apart.yaml", "pictures")]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 30
    assert min(map(len, patients)) >= 3


def test_equal_images_stay_in_one_split_if_asked(tmp_path: Path) -> None:
    for number in range(40):
        zoo.image(tmp_path / "ab"[number % 10 % 2] / f"{number}.png", number % 10)
    for together, shared in (([], True), (["contents"], False)):
        shares = {"validation": 0.2, "test": 0.2} | ({"together": together} if together else {})
        source = Folder(path=str(tmp_path), fractions=shares)
        parts = [source.open(split, name="s", data_dir=None).ids for split in SPLITS]
        held = [{int(Path(name).stem) % 10 for name in ids} for ids in parts]
        assert bool(held[0] & held[1] or held[0] & held[2] or held[1] & held[2]) == shared
        assert sum(map(len, parts)) == 40


def test_nearly_equal_classes_are_one_or_several_as_the_user_decides(cli: Cli) -> None:
    zoo.nearly_equal(Path("data"))
    code, _, err = cli("init", "mine.yaml", "--texts", "data/news.csv", "--clients", 1)
    assert (code, Path("mine.yaml").exists()) == (2, False)
    assert "--fold-labels makes one class of them, --keep-labels leaves them apart" in err
    for option, classes in (("--fold-labels", 2), ("--keep-labels", 5)):
        assert cli("init", f"{classes}.yaml", "--texts", "data/news.csv", "--clients", 1, option)[0] == 0
        assert len(parts(f"{classes}.yaml", "texts")[0].classes["label"]) == classes


def test_what_is_public_is_not_private_too_whatever_it_is_called(cli: Cli) -> None:
    zoo.beside(Path("data"))
    shutil.copytree("data", "copy")
    for number in range(30):
        for ending in ("jpg", "txt"):
            Path(f"copy/{number}.{ending}").rename(f"copy/z{number}.{ending}")
        zoo.image(Path(f"other/{number}.jpg"), 100 + number)  # other images of the same names
        shutil.copy(f"data/{number}.txt", f"other/{number}.txt")
    code, _, err = cli("init", "leak.yaml", "--pairs", "data", "--public", "copy", "--clients", 1)
    assert (code, "30 images of --pairs are in it as well" in err, Path("leak.yaml").exists()) == (2, True, False)
    assert cli("init", "apart.yaml", "--pairs", "data", "--public", "other", "--clients", 1)[0] == 0
    assert cli("run", "apart.yaml", "--dry-run")[0] == 0


def test_what_cannot_be_read_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    zoo.classes(tmp_path / "images")
    (tmp_path / "images" / "a" / "bad.png").write_bytes(b"x")
    zoo.sounds(tmp_path / "sounds")
    (tmp_path / "sounds" / "hum" / "bad.wav").write_bytes(b"RIFF")
    for number in range(9):
        (tmp_path / "phone").mkdir(exist_ok=True)
        (tmp_path / "phone" / f"{number}.heic").write_bytes(b"x")
    for purpose, folder, words in (
        ("pictures", "images", "1 images cannot be read, first a/bad.png"),
        ("sounds", "sounds", "1 recordings cannot be read, first hum/bad.wav"),
        ("pictures", "phone", "but 9 .heic files, such as '0.heic': "),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            StarterSource.of(purpose, tmp_path / folder)


def test_marks_of_missing_values_among_classes_are_warned_of(tmp_path: Path) -> None:
    rows = [f"a text of {number} words,{('yes', 'no', 'k.A.')[number % 3]}" for number in range(60)]
    (tmp_path / "news.csv").write_text("\n".join(["text,label", *rows]))
    warnings = " ".join(StarterSource.of("texts", tmp_path / "news.csv").warnings)
    assert "class 'k.A.' of column 'label' looks like a missing value (20 rows)" in warnings


def test_languages_and_depths_of_the_whole_set_are_reported(cli: Cli) -> None:
    zoo.languages(Path("news"))
    zoo.depths(Path("scans"))
    code, out, _ = cli("init", "mine.yaml", "--texts", "news/news.csv", "--pictures", "scans", "--clients", 1)
    assert code == 0
    assert "several languages (German 50%, English 50%)" in out or "several languages (English 50%, German 50%)" in out
    assert "depths of images: 30 of 8 bits, 10 of 12 bits" in out
    assert "width / height from 0.67 to 3.33" in out


def deep(*values: int) -> Image.Image:
    pixels = np.zeros((12, 16), np.uint16)
    for place, value in enumerate(values):
        pixels[:, 1 + place : 2 + place] = value
    return Image.fromarray(pixels)


def halves(*values: int) -> Callable[[int], Image.Image]:
    return lambda number: zoo.grey(*([values[0]] if number < 12 else values[1:]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (zoo.masked(halves(1, 255)), "but not the same in all: 12 with 1 ('masks/0.png'), 12 with 255"),
        (zoo.masked(lambda number: zoo.grey(*range(1, 4 + number % 10))), "numbers of objects, or of classes"),
        (zoo.masked(lambda number: zoo.grey(40 + number)), "but not the same in all"),
        (zoo.masked(lambda number: zoo.grey(128, 128, 255)), "values 0, 128, 255, which are not numbers"),
        (zoo.masked(lambda number: Image.new("RGB", (16, 12), (90 * (number % 3), 0, 9))), "colours such as (0, 0, 9)"),
        (zoo.masked(lambda number: zoo.grey(*range(1, 2 + number % 4))), "numbers of objects, or of classes"),
        (zoo.masked(lambda number: deep(1 + number, 300 + number)), "which are not numbers 0, 1, 2, ... of classes"),
        (zoo.masked(lambda number: zoo.palette(1, (255, 0, 0) if number % 2 else (0, 255, 0))), "palettes that differ"),
        (zoo.masked(lambda number: zoo.grey(1) if number % 2 else zoo.palette(1, (255, 0, 0))), "a palette in some"),
        (zoo.masked(lambda number: Image.new("RGBA", (16, 12), (0, 0, 0, 9))), "is partly transparent"),
        (zoo.masked(lambda number: zoo.grey(255, size=(12, 12))), "24 of 24 masks have another aspect"),
        (zoo.masked(lambda number: zoo.grey(255), orientation=6), "24 of 24 images are turned by EXIF"),
        (zoo.masked(lambda number: zoo.grey(255), orientation=3), "24 of 24 images are turned by EXIF"),
    ],
)
def test_masks_of_two_meanings_are_refused(tmp_path: Path, make: zoo.Make, words: str) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=re.escape(words)):
        StarterSource.of("masks", tmp_path)


@pytest.mark.parametrize(
    ("values", "message", "words"),
    [
        ((1,), "names: [none, cell]", 'names: ["none", "cell"], threshold: 0'),
        ((255,), "names: [none, cell]", 'names: ["none", "cell"], threshold: 127'),
        ((1, 2), "names: [none, cell, wall]", 'names: ["none", "cell", "wall"]'),
        ((1, 2, 3), "names: [none, cell, wall]", "masks have 3; write settings that cover all values"),
        ((1, 3), "threshold: 127", "masks have values 0, 1, 3, which it does not divide"),
        ((1,), "class: 3", "write threshold: N, or names"),
        ((1,), "threshold: low", "write threshold: N, or names"),
    ],
)
def test_meanings_of_masks_are_checked(tmp_path: Path, values: tuple[int, ...], message: str, words: str) -> None:
    zoo.masked(lambda number: zoo.grey(*values))(tmp_path)
    refused = words.startswith(("masks have", "write"))
    with pytest.raises(DataError) if refused else contextlib.nullcontext() as error:
        assert StarterSource.of("masks", tmp_path, {"mask_values": message}).details == words
    assert not refused or words in str(error.value)


def test_the_meaning_of_masks_may_be_given(cli: Cli) -> None:
    zoo.masked(halves(1, 255))(Path("data"))
    code, out, _ = cli("init", "mine.yaml", "--masks", "data", "--clients", 1, "--mask-values", "threshold: 0")
    assert (code, "masks: threshold: 0: by --mask-values" in out) == (0, True)
    assert yaml.safe_load(Path("mine.yaml").read_text())["server"]["task"]["threshold"] == 0


def test_upright_masks_of_turned_images_are_read(tmp_path: Path) -> None:
    zoo.masked(lambda number: zoo.grey(255, size=(12, 16)), orientation=6)(tmp_path)
    assert StarterSource.of("masks", tmp_path).details == "threshold: 127"


def test_a_palette_of_one_class_is_read_by_its_numbers(tmp_path: Path) -> None:
    zoo.masked(lambda number: zoo.palette(1, (0, 200, 0)))(tmp_path)
    assert StarterSource.of("masks", tmp_path).details == "names: [background, class-1, class-2]"


def test_paths_start_from_the_file_that_names_them(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.texts(Path("site/data"))
    assert cli("init", "site/mine.yaml", "--texts", "site/data/news.csv", "--clients", 1)[0] == 0
    assert yaml.safe_load(Path("site/mine.yaml").read_text())["data"]["sources"]["texts"]["path"] == "data/news.csv"
    Path("site").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    assert parts(tmp_path / "moved" / "mine.yaml", "texts")
    (tmp_path / "other" / "data").mkdir(parents=True)
    (tmp_path / "other" / "data" / "news.csv").write_text("text,label\na,b\n")
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path / "other"))
    with pytest.raises(Exception, match=r"may be '.*/other/data/news.csv', in the data folder, or '.*/moved/data/news"):
        Experiment.load(tmp_path / "moved" / "mine.yaml")
