"""What the records say of a paper: claims that hold, claims that do not, and maps."""

from __future__ import annotations

from collections.abc import Callable

from polyfed.lab.studies.evidence import PaperEvidence, evidence_table
from polyfed.lab.studies.records import StudyRecord, record_pictures, record_text
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study

Load = Callable[..., Study]
CLAIMS = {"primary": ["prox > tiny on r1 at 1", "prox > tiny on r1 at 5"]}
AXES = {"pairs": {"setting": "run.seed", "values": [1, 5]}}


def record(loaded: Load, name: str = "papers/tiny-t1", item: str = "Table 1", paper: str = "Tiny") -> StudyRecord:
    """``prox`` is above ``tiny`` by about 2 at the first point, and below it by as much at the second."""
    study = loaded(
        seeds=5, axes=AXES, claims=CLAIMS, source={"paper": paper, "item": item},
        figures=[{"map": "prox > tiny on r1", "x": "pairs"}],
    )  # fmt: skip
    values = {}
    for point, sign in ((("1",), 1), (("5",), -1)):
        values["tiny", point, "r1"] = {seed: 10.0 + seed for seed in study.seeds}
        values["prox", point, "r1"] = {seed: 10.0 + seed + sign * (2 + seed / 10) for seed in study.seeds}
    cells = {
        f"{row}, {label}, seed {k}": f"{row}{label}{k}" for row in ("tiny", "prox") for label in "15" for k in range(5)
    }
    return StudyRecord(name, "small", study, Results(study, values, cells=cells, code=("0.1.0 abc",)))


def test_a_row_of_the_short_table(loaded: Load) -> None:
    recorded = [record(loaded, item=f"Table {number}") for number in range(1, 6)]
    paper = PaperEvidence.of("Tiny", "Small is good.", "explanation/tiny.md", recorded)
    assert paper.row("docs/") == [
        "[Tiny](docs/explanation/tiny.md#where-its-claims-hold)", "Small is good.", "5", "5", "0",
    ]  # fmt: skip


def test_papers_without_a_record_say_so(loaded: Load) -> None:
    other = PaperEvidence.of("Other", "Good.", "explanation/other.md", [record(loaded)])
    assert other.section("../results") == "None of its own studies was run yet.\n"
    assert evidence_table([other], "docs/").splitlines()[2] == (
        "| [Other](docs/explanation/other.md#where-its-claims-hold) | Good. | not run | not run | not run |"
    )


def test_the_section_has_claims_and_maps_with_their_pictures(loaded: Load) -> None:
    own = record(loaded)
    text = PaperEvidence.of("Tiny", "", "explanation/tiny.md", [own]).section("../results")
    assert "| prox > tiny on r1 at 5 | Table 1 | contradicted | 5 | -2.20 |" in text
    assert "![prox > tiny on r1](../results/papers-tiny-t1-small-map-1.svg)" in text
    assert "held at 1 of 2 points (pairs 1)" in text
    assert "[papers/tiny-t1](../results/papers-tiny-t1-small.md)" in text
    (picture,) = record_pictures(own)
    assert picture == "papers-tiny-t1-small-map-1.svg"
    assert record_pictures(own) == record_pictures(own)
    assert "](papers-creamfl-t1-small-map-1.svg)" in record_text(record(loaded, "papers/creamfl-t1"))
