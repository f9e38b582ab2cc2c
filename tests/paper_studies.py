"""Study files of papers/ by their paths below it without endings, such as ``creamfl/t1``."""

from __future__ import annotations

from study_records import STUDIES

__all__ = ["ITEMS", "NAMES", "STUDIES"]
ITEMS = {
    "creamfl": ["t1", "t2", "t3", "t4", "f3", "f4", "f5", "f6"],
    "fedcola": [*(f"t{k}" for k in range(1, 11)), "f4", "f5", "f7", "f8", "shapley"],
    "fedafd": [*(f"t{k}" for k in range(1, 10)), "f1", "f2", "f3", "k10"],
    "fedaid": [*(f"t{k}" for k in range(1, 18)), *(f"f{k}" for k in range(3, 10))],
}
NAMES = [f"{paper}/{item}" for paper, items in ITEMS.items() for item in items]
"""Studies that are a table, figure or section of a paper."""
