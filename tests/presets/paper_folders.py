"""Tiny Parquet folders in the layouts that the presets at the papers' sizes read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from item_tables import noise, struct_of

KARPATHY = {"train": 30, "restval": 10, "val": 6, "test": 10}
CAPTIONED = {"train": 160, "validation": 6, "test": 30}
LABELLED = {"train": 300, "test": 60}
ASKED = {"train": 12, "validation": 8}
IMAGES = [struct_of(noise(seed, 16, 16)) for seed in range(8)]


def paper_folders(data: Path) -> Path:
    """All of them below ``data``."""
    for name, sizes, captions in (("coco", KARPATHY, (5, 6, 7)), ("flickr30k", CAPTIONED, (5,))):
        for split, rows in sizes.items():
            counts = [captions[row % len(captions)] for row in range(rows)]
            texts = [[f"{split} {row} caption {k}" for k in range(count)] for row, count in enumerate(counts)]
            ids = [f"{split}-{row}" for row in range(rows)]
            _write(data / name / f"{split}.parquet", {"image": _images(rows), "image_id": ids, "captions": texts})
    for split, rows in LABELLED.items():
        labels = [row % 4 for row in range(rows)]
        _write(data / "cifar100" / f"{split}.parquet", {"image": _images(rows), "label": labels}, classes=4)
        texts = [f"news {row} of {label}" for row, label in enumerate(labels)]
        _write(data / "ag_news" / f"{split}.parquet", {"text": texts, "label": labels}, classes=4)
    for split, rows in ASKED.items():
        asked = [questions(row) for row in range(rows)]
        columns = {"image": _images(rows), "image_id": [f"COCO-{split}-{row}" for row in range(rows)]}
        columns["questions"] = [[question for question, _ in pairs] for pairs in asked]
        _write(
            data / "vqa_v2" / f"{split}.parquet",
            columns | {"answers": [[answers for _, answers in pairs] for pairs in asked]},
        )
        _write(data / "vqa_v2_hub" / f"{split}-00000-of-00001.parquet", _one_row_a_question(columns, asked))
    return data


def questions(row: int) -> list[tuple[str, list[str]]]:
    """Two questions on an image, each with the answers of ten annotators."""
    yes = 10 - row % 4
    return [
        ("Is it round?", ["yes"] * yes + ["no"] * (10 - yes)),
        ("How many are there?", [str(row % 3)] * 6 + ["2"] * 3 + [f"about {row}"]),
    ]


def _one_row_a_question(columns: Mapping[str, Sequence[Any]], asked: Sequence[Any]) -> dict[str, list[Any]]:
    """Layout of VQA v2 on the hub: the image again for each of its questions, answers as structs."""
    flat: dict[str, list[Any]] = {"image": [], "image_id": [], "question_id": [], "question": [], "answers": []}
    for row, pairs in enumerate(asked):
        for number, (question, answers) in enumerate(pairs):
            given = [{"answer": text, "answer_confidence": "yes", "answer_id": k} for k, text in enumerate(answers)]
            values = (columns["image"][row], columns["image_id"][row], 10 * row + number, question, given)
            for column, value in zip(flat.values(), values, strict=True):
                column.append(value)
    return flat


def _images(rows: int) -> list[dict[str, Any]]:
    return [IMAGES[row % len(IMAGES)] for row in range(rows)]


def _write(path: Path, columns: Mapping[str, Sequence[Any]], classes: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {"label": {"names": [f"class {k}" for k in range(classes)], "_type": "ClassLabel"}} if classes else {}
    metadata = {b"huggingface": json.dumps({"info": {"features": names}}).encode()}
    pq.write_table(pa.table(dict(columns)).replace_schema_metadata(metadata), path)
