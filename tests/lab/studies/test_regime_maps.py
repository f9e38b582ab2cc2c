"""Where over two axes a claim holds: marks, sentence, table and figure, from differences made up by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.figures import draw_map
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import ClaimMap, claim_maps

Load = Callable[..., Study]
AXES = {"pairs": {"setting": "run.seed", "values": [250, 1000]}, "epochs": {"setting": "run.rounds", "values": [1, 5]}}
MAP = {"map": "prox > tiny on r1", "x": "pairs", "y": "epochs"}
# what prox is above tiny by: above, undecided, below, and a single seed
ABOVE = {("250", "1"): (1, 1.1, 1.2, 1.1, 1.1), ("250", "5"): (-1, 0, 1.5, -1, 1)}
ABOVE |= {("1000", "1"): (-2, -2.1, -2.2, -2.1, -2.1), ("1000", "5"): (3,)}


def own_map(study: Study, above: dict[Any, Any] = ABOVE) -> ClaimMap:
    values = {}
    for point, differences in above.items():
        values["tiny", point, "r1"] = dict.fromkeys(range(5), 10.0)
        values["prox", point, "r1"] = {seed: 10.0 + more for seed, more in enumerate(differences)}
    (claims,) = claim_maps(Results(study, values))
    return claims


def test_marks_are_where_the_interval_lies(loaded: Load) -> None:
    claims = own_map(loaded(seeds=5, axes=AXES, figures=[MAP]))
    assert [cell.verdict for cell in claims.cells.values()] == ["above", "undecided", "below", "undecided"]
    table = claims.table
    assert table.columns == ("epochs / pairs", "250", "1000")
    assert table.rows == [["1", "+1.10 ▲", "-2.10 ▼"], ["5", "+0.10 ?", "+3.00 ?"]]
    assert "one family, which shares the level" in table.notes[1]
    assert claims.sentence == (
        "prox > tiny on r1: above at 1 of 4 points (epochs 1: pairs 250), "
        "below at 1 (epochs 1: pairs 1000), undecided at 2."
    )


def test_points_that_were_not_run_and_those_that_a_row_has_not(loaded: Load) -> None:
    study = loaded(seeds=5, axes=AXES, rows={"tiny": {}, "prox": {"only": {"epochs": [1]}}}, figures=[MAP])
    claims = own_map(study, {("250", "1"): (1, 1.1, 1.2, 1.1, 1.1)})
    assert claims.sentence == "prox > tiny on r1: above at 1 of 2 points (epochs 1: pairs 250), not run at 1."
    assert [row[2] for row in claims.table.rows] == ["-", "-"]
    assert ClaimMap(Results(study, {}), claims.drawing).sentence == "prox > tiny on r1: not run at 2 of 2 points."


def test_the_points_of_a_map_share_the_level(loaded: Load) -> None:
    study, above = loaded(seeds=5, axes=AXES, figures=[MAP]), {("250", "1"): (0.5, 1.5, 2.5, 1.0, 2.0)}
    assert own_map(study, above).cells["250", "1"].verdict == "undecided"  # one of four points
    axes = {name: {**axis, "values": axis["values"][:1]} for name, axis in AXES.items()}
    assert own_map(loaded(seeds=5, axes=axes, figures=[MAP]), above).cells["250", "1"].verdict == "above"


def test_a_map_and_a_judged_claim_agree_at_one_point(loaded: Load) -> None:
    axes = {"pairs": {"setting": "run.seed", "values": [250]}}
    claims = {"method": ["prox > tiny on r1 at 250"]}
    own = own_map(loaded(seeds=5, axes=axes, claims=claims, figures=[MAP | {"y": None}]), {("250",): (1, 2, 3, 2, 1)})
    (item,), (cell,) = own.results.judgements(), own.cells.values()
    assert (cell.comparison, cell.in_words) == (item.comparison, item.in_words)
    assert f"{item.verdict} at 1 of 1 points" in own.sentence


def test_one_axis_is_one_row(loaded: Load) -> None:
    study = loaded(seeds=5, axes={"pairs": AXES["pairs"]}, figures=[MAP | {"y": None}])
    table = own_map(study, {("250",): (1, 1.1, 1.2, 1.1, 1.1), ("1000",): (3,)}).table
    assert (table.columns, table.rows) == (("pairs", "250", "1000"), [["", "+1.10 ▲", "+3.00 ?"]])


def test_the_figure_has_a_cell_a_point_with_one_scale_of_colours(loaded: Load) -> None:
    (axes,) = draw_map(own_map(loaded(seeds=5, axes=AXES, figures=[MAP]))).axes
    (image,) = axes.images
    assert list(image.get_array().flat) == pytest.approx([1.1, -2.1, 0.1, 3.0])  # type: ignore[union-attr]
    assert image.get_clim() == (-3, 3)
    assert [text.get_text() for text in axes.texts] == ["+1.10 ▲", "-2.10 ▼", "+0.10 ?", "+3.00 ?"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["1", "5"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": "pears"}, r"figures.0: unknown 'pears'; did you mean 'pairs'"),
        ({"y": "pairs"}, r"figures.0.*y: 'pairs' is x already"),
        ({"map": "prox > tiny on r2"}, r"figures.0.map: .*unknown 'r2'"),
        ({"map": "ours > tiny on r1"}, r"figures.0.map: .*unknown 'ours'"),
        ({"map": "prox > tiny on r1 at 250, 1"}, r"names a point; a map shows a claim at all points"),
        ({"y": None}, r"figures.0: a map shows all axes of a study, at most two; name 'epochs'"),
    ],
)
def test_a_wrong_map_is_named(loaded: Load, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(seeds=5, axes=AXES, figures=[MAP | wrong])
