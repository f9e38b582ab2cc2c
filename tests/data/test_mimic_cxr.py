"""MIMIC-CXR in the layout of PhysioNet, on a small folder made here."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from polyfed.core.errors import DataError
from polyfed.data.assembly import assemble
from polyfed.data.source import Split
from polyfed.data.sources.mimic_cxr import FINDINGS, MimicCxr, section_text
from polyfed.data.tokenizers import Hashing
from polyfed.data.view import DataContext
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens

HEADINGS = ["subject_id", "study_id", *FINDINGS.values()]
REPORT = """                                 FINAL REPORT
 EXAMINATION:  CHEST (PA AND LAT)

 INDICATION:  ___ year old woman with cough.

 FINDINGS:

 Lungs of patient {patient} are clear.
 There is no  effusion.

 IMPRESSION:

 No acute process in study {study}.
"""


class Folder:
    """Ten patients; patient n has two studies if n is even; a study has an AP, a PA and a lateral image.

    Patients 0 to 6 are for training, 7 for validation, 8 and 9 for testing. Patient 1 has no report, and of the
    labels, study s has Edema 1, 0, -1 or blank as s modulo 4 is 0, 1, 2, 3; patient 2 is not in the label table.
    """

    def __init__(self, top: Path, *, packed: bool = True, reports: str = "") -> None:
        self.top, self.packed = top, packed
        self.reports = top / reports
        self.studies = [(10_000_000 + n, 50_000_000 + 10 * n + k) for n in range(10) for k in range(1 + (n % 2 == 0))]
        self._tables()
        for patient, study in self.studies:
            self._files(patient, study)

    def pictures(self, patient: int, study: int) -> list[tuple[str, str]]:
        return [(f"d{study}-{view.lower()}", view) for view in ("AP", "PA", "LATERAL")]

    def part(self, patient: int) -> str:
        return ("train" if patient < 10_000_007 else "validate") if patient < 10_000_008 else "test"

    def folder(self, top: Path, patient: int) -> Path:
        made = top / "files" / f"p{patient}"[:3] / f"p{patient}"
        made.mkdir(parents=True, exist_ok=True)
        return made

    def table(self, name: str, rows: list[list[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        data = text.getvalue().encode()
        path = self.top / f"mimic-cxr-2.0.0-{name}.csv{'.gz' * self.packed}"
        path.write_bytes(gzip.compress(data) if self.packed else data)

    def _tables(self) -> None:
        every = [(*key, dicom, view) for key in self.studies for dicom, view in self.pictures(*key)]
        split = [[dicom, study, patient, self.part(patient)] for patient, study, dicom, _ in every]
        self.table("split", [["dicom_id", "study_id", "subject_id", "split"], *split])
        views = [[dicom, patient, study, "CHEST", view, 3056] for patient, study, dicom, view in reversed(every)]
        columns = ["dicom_id", "subject_id", "study_id", "PerformedProcedureStepDescription", "ViewPosition", "Rows"]
        self.table("metadata", [columns, *views])
        marks = [[p, s, *self.marks(s)] for p, s in self.studies if p != 10_000_002]
        self.table("chexpert", [HEADINGS, *marks])

    def marks(self, study: int) -> list[str]:
        edema = ["1.0", "0.0", "-1.0", ""][study % 4]
        return [edema if name == "Edema" else "1.0" if name == "No Finding" else "" for name in FINDINGS.values()]

    def _files(self, patient: int, study: int) -> None:
        place = self.folder(self.top, patient) / f"s{study}"
        place.mkdir(parents=True)
        for dicom, view in self.pictures(patient, study):
            shade = study % 100 + {"AP": 0, "PA": 100, "LATERAL": 150}[view]
            Image.new("L", (12, 10), shade).save(place / f"{dicom}.jpg", quality=100)
        if patient != 10_000_001:
            report = self.folder(self.reports, patient) / f"s{study}.txt"
            report.write_text(REPORT.format(patient=patient, study=study))


@pytest.fixture
def made(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def opened(folder: Folder, split: str = "train", **settings: Any) -> Split:
    given = {"path": folder.top.name} | settings
    return MimicCxr.model_validate(given).open(split, name="mimic", data_dir=folder.top.parent)


def listed(split: Split, column: str) -> list[Any]:
    return split.read(column).values.to_pylist()


# ---- items


@pytest.mark.parametrize("packed", [True, False])
def test_an_item_is_an_image_with_its_patient_study_and_view(tmp_path: Path, packed: bool) -> None:
    folder = Folder(tmp_path, packed=packed)
    split = opened(folder)
    expected = [
        (dicom, patient, study, view)
        for patient, study in folder.studies
        for dicom, view in folder.pictures(patient, study)
        if folder.part(patient) == "train" and view != "LATERAL"
    ]
    result = zip(split.ids, listed(split, "patient"), listed(split, "study"), listed(split, "view"), strict=True)
    assert list(result) == expected
    paths = [tmp_path / "files" / "p10" / f"p{p}" / f"s{s}" / f"{d}.jpg" for d, p, s, _ in expected]
    assert listed(split, "image") == [{"bytes": None, "path": str(path)} for path in paths]


def test_splits_are_the_official_ones(made: Folder) -> None:
    assert set(listed(opened(made), "patient")) == set(range(10_000_000, 10_000_007))
    assert set(listed(opened(made, "validation"), "patient")) == {10_000_007}
    assert set(listed(opened(made, "test"), "patient")) == {10_000_008, 10_000_009}
    with pytest.raises(DataError, match=r"no split 'validate'; did you mean 'validation'\?"):
        opened(made, "validate")


@pytest.mark.parametrize(("views", "share"), [(["LATERAL"], 1), (["AP", "PA"], 2), (None, 3)])
def test_views_choose_the_images(made: Folder, views: list[str] | None, share: int) -> None:
    split = opened(made, views=views)
    assert len(split) == 11 * share
    assert set(listed(split, "view")) == set(views or ["AP", "PA", "LATERAL"])


def test_without_views_the_metadata_are_not_needed(made: Folder) -> None:
    (made.top / "mimic-cxr-2.0.0-metadata.csv.gz").unlink()
    assert len(opened(made, views=None)) == 33
    message = r"no mimic-cxr-2\.0\.0-metadata\.csv\.gz or .*physionet\.org/content/mimic-cxr-jpg"
    with pytest.raises(DataError, match=message):
        opened(made)


def test_items_become_samples(made: Folder) -> None:
    split = opened(made, incomplete="leave_out", targets={"edema": "edema"})
    views = {"image": Pixels(size=8), "text": Tokens(tokenizer=Hashing(), length=8)}
    samples = assemble(split, views, DataContext(made.top / "cache"))
    assert split.left_out == {"text": 2}
    assert len(samples) == 20
    shades = ((samples.batch(torch.arange(20)).inputs["image"].mean((1, 2, 3)) + 1) * 127.5).round().int().tolist()
    pairs = zip(listed(split, "study"), split.ids, strict=True)
    assert shades == [study % 100 + 100 * key.endswith("-pa") for study, key in pairs]
    assert samples.matches.tolist() == [number // 2 for number in range(20)], "a study's images answer its report"
    assert samples.classes["edema"] == ("absent", "present")


# ---- texts


def test_texts_are_findings_and_impression(made: Folder) -> None:
    split = opened(made)
    text = "Lungs of patient {} are clear. There is no effusion. No acute process in study {}."
    for patient, study, actual in zip(*(listed(split, name) for name in ("patient", "study", "text")), strict=True):
        assert actual == (None if patient == 10_000_001 else text.format(patient, study))
    assert listed(opened(made, sections=["impression"]), "text")[0] == "No acute process in study 50000000."
    assert listed(opened(made, sections=[]), "text")[0].startswith("EXAMINATION: CHEST (PA AND LAT) INDICATION:")
    assert set(listed(opened(made, sections=["technique"], incomplete="leave_out"), "text")) != {None}


def test_reports_may_be_elsewhere_and_are_read_only_when_asked_for(tmp_path: Path) -> None:
    folder = Folder(tmp_path, reports="texts")
    split = opened(folder)
    assert len(listed(split, "image")) == 22
    message = r"none of 11 studies has a report.*physionet\.org/content/mimic-cxr/.*set reports"
    with pytest.raises(DataError, match=message):
        listed(split, "text")
    there = opened(folder, reports=f"{tmp_path.name}/texts")
    assert listed(there, "text")[0].endswith("No acute process in study 50000000.")
    with pytest.raises(DataError, match=r"no folder 'files' with reports in .*or set reports to their folder"):
        listed(opened(folder, reports=f"{tmp_path.name}/files"), "text")


# ---- sections of reports


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("FINDINGS: clear.\nIMPRESSION: normal.", "clear. normal."),
        ("IMPRESSION: normal.\nFINDINGS: clear.", "normal. clear."),
        ("  Findings: clear.\n\n  Impression: normal.", "clear. normal."),
        ("INDICATION: cough\nFINDINGS AND IMPRESSION:\nclear\nRECOMMENDATION(S): none", "clear"),
        ("FINDINGS/IMPRESSION: clear\nNOTIFICATION: Dr. ___ at 5:37", "clear"),
        ("FINDING: clear\nLUNGS: dry\nHEART: small\nCOMPARISON: none\n", "clear LUNGS: dry HEART: small"),
        ("IMPRESSION: a\nADDENDUM:  later\nIMPRESSION: b", "a b"),
        ("IMPRESSION: x\nAP CHEST, 5:37 A.M.: moved\nFindings were discussed with the team: yes", None),
        ("FINAL REPORT\n Portable chest:\n no change", "whole Portable chest: no change"),
        ("FINAL REPORT\nFINDINGS:\n\nIMPRESSION:\n", "whole FINDINGS: IMPRESSION:"),
        ("INDICATION: see IMPRESSION: below", "whole INDICATION: see IMPRESSION: below"),
        ("", ""),
        (" \n FINAL REPORT \n", ""),
    ],
)
def test_sections_are_found_by_their_headings(report: str, expected: str | None) -> None:
    wanted = ("findings", "impression")
    if expected is None:
        assert section_text(report, wanted) == "x AP CHEST, 5:37 A.M.: moved Findings were discussed with the team: yes"
        return
    none = not expected or expected.startswith("whole ")
    assert section_text(report, wanted, "none") == (None if none else expected)
    assert section_text(report, wanted) == (expected.removeprefix("whole ") or None)


# ---- labels


def test_labels_by_mention_and_by_sign(made: Folder) -> None:
    mentioned, positive = opened(made), opened(made, labels="positive")
    marks = [
        "" if patient == 10_000_002 else ["1", "0", "-1", ""][study % 4]
        for patient, study in zip(listed(mentioned, "patient"), listed(mentioned, "study"), strict=True)
    ]
    assert set(marks) == {"1", "0", "-1", ""}
    assert listed(mentioned, "edema") == [int(mark != "") for mark in marks]
    assert listed(positive, "edema") == [int(mark == "1") for mark in marks]
    assert not any(listed(mentioned, "lung_lesion"))
    assert listed(mentioned, "no_finding") == [int(p != 10_000_002) for p in listed(mentioned, "patient")]
    assert set(FINDINGS) > {"edema", "pleural_effusion", "consolidation", "pneumothorax", "pneumonia"}
    assert len(FINDINGS) == 14


# ---- what is missing or wrong


def test_missing_images_are_left_out_or_named(made: Folder) -> None:
    (made.top / "files" / "p10" / "p10000000" / "s50000000" / "d50000000-ap.jpg").unlink()
    split = opened(made, incomplete="leave_out")
    assert split.left_out == {"image": 1, "text": 2}
    assert split.ids[0] == "d50000000-pa"
    with pytest.raises(DataError, match=r"row 0 \(path '.*d50000000-ap\.jpg'\): not a readable image"):
        Pixels(size=8).open(opened(made).modality("image"), "image", DataContext(made.top / "cache"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"views": ["AP", "PAA"]}, r"views: no image has 'PAA'; did you mean 'PA'\? valid: AP, LATERAL, PA"),
        ({"path": "nowhere"}, r"no folder 'nowhere' under the data folder"),
        ({"reports": "nowhere"}, r"no folder 'nowhere' under the data folder"),
        ({"targets": {"y": "oedema"}}, r"targets\.y\): no column 'oedema'; did you mean 'edema'\?"),
        ({"where": {"patient": 7}}, r"where\.patient: no item has 7; valid: 10000000, 10000001"),
    ],
)
def test_errors_name_what_is_wrong(made: Folder, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(made, **settings)


def test_a_table_that_is_not_one_is_named(made: Folder) -> None:
    made.table("split", [["dicom_id", "study_id", "split"], ["a", 1, "train"]])
    with pytest.raises(DataError, match=r"mimic-cxr-2\.0\.0-split\.csv\.gz: cannot be read .*subject_id"):
        opened(made)
    (made.top / "mimic-cxr-2.0.0-split.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"mimic-cxr-2\.0\.0-split\.csv\.gz: cannot be read"):
        opened(made)
    made.table("split", [["dicom_id", "study_id", "subject_id", "split"], ["a", 1, 2, "test"]])
    with pytest.raises(DataError, match="no image of split train"):
        opened(made)


@pytest.mark.parametrize("column", ["dicom_id", "study_id", "subject_id"])
@pytest.mark.parametrize("views", [None, ["AP"]])
def test_an_image_without_a_key_is_named(made: Folder, column: str, views: list[str] | None) -> None:
    header = ["dicom_id", "study_id", "subject_id", "split"]
    rows = [["d50000000-ap", 50000000, 10000000, "train"], ["d50000000-pa", 50000000, 10000000, "train"]]
    rows[1][header.index(column)] = ""
    made.table("split", [header, *rows])
    message = rf"source 'mimic', mimic-cxr-2\.0\.0-split\.csv\.gz, column '{column}', row 1: no value; fill it"
    with pytest.raises(DataError, match=message):
        opened(made, views=views)


# ---- caches and configuration


def test_images_stay_cached_whatever_is_made_of_reports_and_labels(made: Folder) -> None:
    plain = opened(made)
    others = {name: opened(made, **settings) for name, settings in _VARIANTS.items()}
    same = {name: plain.read("image").fingerprint == other.read("image").fingerprint for name, other in others.items()}
    assert same == {"sections": True, "whole": True, "labels": True, "views": False, "where": False}
    texts = {name: plain.read("text").fingerprint == other.read("text").fingerprint for name, other in others.items()}
    assert texts == {"sections": False, "whole": False, "labels": True, "views": False, "where": False}
    assert plain.read("edema").fingerprint != others["labels"].read("edema").fingerprint


_VARIANTS: dict[str, dict[str, Any]] = {
    **{"sections": {"sections": ["findings"]}, "whole": {"without_sections": "none"}},
    **{"labels": {"labels": "positive"}, "views": {"views": ["AP"]}, "where": {"where": {"view": "AP"}}},
}
