"""Parquet of a site's pictures and reports, from ``studies.csv`` and ``pictures/``; a patient is in one split."""

import csv
import hashlib
from pathlib import Path

from datasets import Dataset, Features, Image, Value

DISEASES = ("edema", "pleural_effusion", "consolidation", "pneumothorax", "pneumonia")
TEXTS = dict.fromkeys(("text", "id", "study", "patient"), Value("string"))
COLUMNS = Features({"image": Image(), **TEXTS, **dict.fromkeys(DISEASES, Value("int8"))})


def split_of(patient):
    share = int(hashlib.sha256(patient.encode()).hexdigest()[:8], 16) / 2**32
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"


def item(row):
    picture = {"bytes": Path("pictures", row["picture"]).read_bytes(), "path": None}
    texts = {"text": row["report"], "id": row["picture"], "study": row["study"], "patient": row["patient"]}
    return {"image": picture, **texts, **{name: int(row[name]) for name in DISEASES}}


with Path("studies.csv").open(encoding="utf-8") as file:
    rows = list(csv.DictReader(file))
Path("data/studies").mkdir(parents=True)
for split in ("train", "validation", "test"):
    items = [item(row) for row in rows if split_of(row["patient"]) == split]
    Dataset.from_list(items, features=COLUMNS).to_parquet(f"data/studies/{split}.parquet")
