"""MIMIC-CXR: chest X-rays with radiology reports, in the folders in which PhysioNet distributes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
from pydantic import Field, field_validator

from polyfed.core.errors import DataError, nearest
from polyfed.data.arrow import IMAGE, file_key, fingerprint_of
from polyfed.data.source import ColumnNames, path_of
from polyfed.data.tables import SplitTable, TableSource

FINDINGS = {
    name.lower().replace(" ", "_"): name
    for name in (
        *("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture"),
        *("Lung Lesion", "Lung Opacity", "No Finding", "Pleural Effusion", "Pleural Other", "Pneumonia"),
        *("Pneumothorax", "Support Devices"),
    )
}
"""Column of the source -> column of the CheXpert table."""

_SPLITS = {"train": "train", "validation": "validate", "test": "test"}
_IMAGES, _REPORTS = "mimic-cxr-jpg", "mimic-cxr"  # names of the projects on PhysioNet


class MimicCxr(TableSource):
    """Images of MIMIC-CXR-JPG with the reports of MIMIC-CXR (Johnson et al. 2019), for holders of PhysioNet access.

    ``path`` holds ``files/p10/p10000032/s50414267/<dicom>.jpg`` and the tables ``mimic-cxr-2.0.0-split.csv``,
    ``-metadata.csv`` (for views) and ``-chexpert.csv`` (for labels), each plain or ``.gz``. The reports,
    ``files/p10/p10000032/s50414267.txt``, may be in the same folder or in ``reports``.

    An item is an image, with the columns ``id`` (DICOM id), ``image``, ``text`` (null without a report), ``patient``,
    ``study``, ``view``, and for each of the 14 CheXpert labels one of 0 and 1: ``edema``, ``pleural_effusion``,
    ``no_finding``, ... A study without labels has 0 in all. Images of a study share its report, and are right
    answers to each other unless ``matches`` is changed.

    Reports are read at first use of texts, and must not change on disk afterwards: cached features of texts would not
    notice.
    """

    columns: dict[str, ColumnNames] = Field(
        default={"image": "image", "text": "text"}, description="modality -> column that holds it"
    )
    matches: str | None = Field(default="study", description="column whose equal values make items match each other")
    path: str = Field(description="folder of MIMIC-CXR-JPG: absolute, or relative to the data folder")
    reports: str | None = Field(default=None, description="folder whose ``files`` hold the reports; None: ``path``")
    views: tuple[str, ...] | None = Field(default=("AP", "PA"), description="ViewPosition of items; None: any")
    sections: tuple[str, ...] = Field(default=("findings", "impression"), description="sections of the text; none: all")
    without_sections: Literal["whole", "none"] = Field(
        default="whole", description="text of reports without these sections: the complete report, or none"
    )
    labels: Literal["mentioned", "positive"] = Field(
        default="mentioned", description="entries that are 1: any (FedAID), even negative and uncertain ones, or 1 only"
    )

    @field_validator("views")
    @classmethod
    def _some_view(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value == ():
            raise ValueError("views: [] leaves no image; name some, such as [AP, PA], or null for all")
        return value

    @field_validator("sections")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if nameless := [name for name in value if not _words(name)]:
            raise ValueError(f"'{nameless[0]}' does not name a section; give words, such as impression")
        return value

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The table of one split; reads the tables that list its images."""
        if split not in _SPLITS:
            raise DataError(f"source '{name}': no split '{split}'; {nearest(split, _SPLITS)}")
        folder = path_of(self.path, name, data_dir).absolute()  # paths of images start with it
        reports = folder if self.reports is None else path_of(self.reports, name, data_dir)
        release = _Release(self, name, folder, reports, (_SPLITS[split],))
        tables = [file for table in ("split", "metadata", "chexpert") if (file := release.find(table))]
        text = fingerprint_of(reports.resolve(), self.sections, self.without_sections)
        depends, stamps = {"text": text, **dict.fromkeys(FINDINGS, self.labels)}, [*map(file_key, tables)]
        return SplitTable(
            read=release.read,
            count=lambda: release.rows.num_rows,
            schema=cxr_schema(),
            where=Path(self.path).as_posix(),
            split=split,
            # images stay cached under other settings of reports and labels
            key=lambda column: fingerprint_of("mimic_cxr", folder.resolve(), self.views, depends.get(column), *stamps),
            ids="id",
            everywhere=replace(release, splits=tuple(_SPLITS.values())).read,
            folder=folder / "files",
        )


def cxr_schema() -> pa.Schema:
    """Schema of the table, with the classes ``absent`` and ``present`` for labels."""
    label = {"_type": "ClassLabel", "names": ["absent", "present"]}
    metadata = {"huggingface": json.dumps({"info": {"features": dict.fromkeys(FINDINGS, label)}})}
    dtypes = {"id": pa.string(), "image": IMAGE, "text": pa.string(), "view": pa.string()}
    dtypes |= {"patient": pa.int64(), "study": pa.int64(), **dict.fromkeys(FINDINGS, pa.int8())}
    return pa.schema(dtypes, metadata=metadata)


@dataclass(frozen=True)
class _Release:
    """Files of the splits.

    Attributes:
        settings: Settings of the source.
        name: Name of the source in the configuration.
        folder: folder of the images and tables.
        reports: folder of the reports.
        splits: names of the splits in the split table.
    """

    settings: MimicCxr
    name: str
    folder: Path
    reports: Path
    splits: tuple[str, ...]

    def read(self, column: str) -> pa.ChunkedArray:
        stored = {"id": "dicom_id", "patient": "subject_id", "study": "study_id"}
        values: Any
        if column in FINDINGS:
            table = self._csv("chexpert", {"study_id": pa.int64(), FINDINGS[column]: pa.float64()})
            given = _looked_up(self.rows["study_id"], table["study_id"], table[FINDINGS[column]])
            is_mentioned = self.settings.labels == "mentioned"
            values = (given.is_valid() if is_mentioned else pc.fill_null(pc.equal(given, 1.0), False)).cast(pa.int8())
        elif column in stored:
            values = self.rows.column(stored[column]).combine_chunks()
        elif column == "view":
            values = self._views(self.rows)
        else:
            values = self._pictures() if column == "image" else self._texts
        return pa.chunked_array([pa.array(values, cxr_schema().field(column).type)])

    @cached_property
    def rows(self) -> pa.Table:
        """The rows of the split table that are items, in its order."""
        dtypes = {"dicom_id": pa.string(), "study_id": pa.int64(), "subject_id": pa.int64(), "split": pa.string()}
        table, place = self._csv("split", dtypes), f"source '{self.name}', {self._file('split').name}"
        for column in ("dicom_id", "study_id", "subject_id"):
            if table[column].null_count:
                row = pc.index(table[column].is_null(), True).as_py()
                raise DataError(f"{place}, column '{column}', row {row}: no value; fill it or take the row out")
        table = table.filter(pc.is_in(table["split"], value_set=pa.array(self.splits)))
        if self.settings.views is not None:
            table = table.filter(pc.is_in(self._views(table), value_set=pa.array(self.settings.views, pa.string())))
        if not table.num_rows:
            raise DataError(f"{place}: no image of split {' or '.join(self.splits)} fits; check views")
        return table

    def _views(self, rows: pa.Table) -> pa.Array:
        metadata = self._csv("metadata", {"dicom_id": pa.string(), "ViewPosition": pa.string()})
        views = set(metadata["ViewPosition"].unique().to_pylist()) - {None}
        if missing := [view for view in self.settings.views or () if view not in views]:
            raise DataError(f"source '{self.name}', views: no image has '{missing[0]}'; {nearest(missing[0], views)}")
        return _looked_up(rows["dicom_id"], metadata["dicom_id"], metadata["ViewPosition"])

    def _pictures(self) -> list[dict[str, str | None] | None]:
        """One struct per image; None for a missing file if incomplete items are left out."""
        self._require_files(self.folder, "images", _IMAGES)
        keys = zip(*(self.rows[key].to_pylist() for key in ("subject_id", "study_id", "dicom_id")), strict=True)
        paths = [f"{_study(self.folder, patient, study)}/{dicom}.jpg" for patient, study, dicom in keys]
        lenient = self.settings.incomplete == "leave_out"
        return [None if lenient and not Path(path).exists() else {"bytes": None, "path": path} for path in paths]

    @cached_property
    def _texts(self) -> list[str | None]:
        """Text of each image's study; None for a missing or empty report.

        Kept, because it is read twice: to choose complete items, and as a column.
        """
        self._require_files(self.reports, "reports", _REPORTS)
        studies = list(zip(self.rows["subject_id"].to_pylist(), self.rows["study_id"].to_pylist(), strict=True))

        def text_of(study: tuple[int, int]) -> str | None:
            path = Path(f"{_study(self.reports, *study)}.txt")
            try:
                report = path.read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                return None
            except OSError as error:
                raise DataError(f"source '{self.name}': report '{path}' cannot be read ({error.strerror})") from error
            return section_text(report, self.settings.sections, self.settings.without_sections)

        distinct = list(dict.fromkeys(studies))
        with ThreadPoolExecutor(8) as pool:  # a quarter of a million small files: waiting for the disk dominates
            texts = dict(zip(distinct, pool.map(text_of, distinct), strict=True))
        if not any(texts.values()):
            what = f"none of {len(texts)} studies has a report with text in '{self.reports}/files'"
            raise DataError(
                f"source '{self.name}': {what}; {_how_to_get(_REPORTS)}, set reports to their folder, or check sections"
            )
        return [texts[study] for study in studies]

    def _require_files(self, top: Path, what: str, project: str) -> None:
        if not (top / "files").is_dir():
            remedy = _how_to_get(project) + ("" if what == "images" else ", or set reports to their folder")
            raise DataError(f"source '{self.name}': no folder 'files' with {what} in '{top}'; {remedy}")

    def find(self, table: str) -> Path | None:
        files = [self.folder / f"mimic-cxr-2.0.0-{table}.csv{packed}" for packed in (".gz", "")]
        return next((file for file in files if file.is_file()), None)

    def _file(self, table: str) -> Path:
        if file := self.find(table):
            return file
        name = f"mimic-cxr-2.0.0-{table}.csv"
        raise DataError(f"source '{self.name}': no {name}.gz or {name} in '{self.folder}'; {_how_to_get(_IMAGES)}")

    def _csv(self, table: str, dtypes: dict[str, pa.DataType]) -> pa.Table:
        """Some columns of a table; blank entries are null."""
        options = pcsv.ConvertOptions(column_types=dtypes, include_columns=list(dtypes), strings_can_be_null=True)
        file = self._file(table)
        try:
            return pcsv.read_csv(file, convert_options=options)
        except (OSError, KeyError, pa.ArrowException) as error:
            reason = f"cannot be read ({str(error).splitlines()[0]}); {_how_to_get(_IMAGES)}"
            raise DataError(f"source '{self.name}', {file.name}: {reason}") from error


def _study(top: Path, patient: int, study: int) -> str:
    # a text, as joining paths of a quarter of a million images takes ten seconds
    folder = f"p{patient:08d}"
    return f"{top}/files/{folder[:3]}/{folder}/s{study}"


def _how_to_get(project: str) -> str:
    return f"get it from https://physionet.org/content/{project}/ (credentialed access) and unpack it there"


def _looked_up(keys: pa.ChunkedArray, table_keys: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.Array:
    # not a join, which reorders rows
    return values.combine_chunks().take(pc.index_in(keys.combine_chunks(), value_set=table_keys.combine_chunks()))


def section_text(report: str, sections: Sequence[str], otherwise: Literal["whole", "none"] = "whole") -> str | None:
    """Text of some sections of a radiology report, in the report's order, with single spaces.

    A section begins with a heading and a colon at the start of a line, and ends at the next heading. In capitals a
    heading is any short phrase with a common word (``FINDINGS AND IMPRESSION``); otherwise all its words must be common
    ones (``Impression``), which excludes sentences with a colon, and ``LUNGS:`` among the findings.

    Args:
        report: text of a report.
        sections: names of sections in any case, singular or plural; a heading with all words of one is that section.
            Without names the text is the complete report.
        otherwise: text of a report in which all of these are missing or empty: ``whole`` of it, or ``none``.

    Returns:
        The text; None instead of an empty one.
    """
    wanted = [_words(name) for name in sections]
    headings = [*_headings(report, _HEADING_WORDS.union(*wanted)), (len(report), len(report), frozenset[str]())]
    parts = [
        report[start:end] for (_, start, words), (end, *_) in pairwise(headings) if any(one <= words for one in wanted)
    ]
    text = " ".join(" ".join(parts).split())
    if not text and (otherwise == "whole" or not wanted):
        text = " ".join(_FIRST_LINE.sub("", report).split())
    return text or None


def _headings(report: str, common: frozenset[str]) -> Iterator[tuple[int, int, frozenset[str]]]:
    for match in _HEADING.finditer(report):
        words = _words(match[1])
        if words & common if match[1].isupper() else words and words <= common:
            yield match.start(), match.end(), words


def _words(phrase: str) -> frozenset[str]:
    return frozenset(word.rstrip("s") for word in re.findall("[a-z]+", phrase.lower())) - _LINKING


_HEADING = re.compile(r"^[ \t]*([A-Za-z][A-Za-z /&(),-]{0,60}?)[ \t]*:", re.MULTILINE)
_FIRST_LINE = re.compile(r"\A\s*FINAL REPORT\b")
_LINKING = frozenset({"and", "for", "of", "the", ""})  # blank: remains of the plural in "(S)"
_HEADING_WORDS = _words(
    "addendum comparison conclusion diagnosis exam examination findings history impression indication information "
    "notification procedure reason recommendation report study summary technique"
)
