"""docs/how-to/masked-sums-at-sites.md, done literally: three sites on loopback train with masked sums and noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from guide import carried_out

pytest.importorskip("opacus", reason="opacus is not installed")
pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "masked-sums-at-sites.md"
SITES = ("north", "south", "coast")


@pytest.mark.slow
def test_the_guide_works_as_it_stands(tmp_path: Path) -> None:
    said = carried_out(PAGE, tmp_path)
    assert "plan and demands: the planned run meets them" in said
    assert "planned for north: epsilon 4.94 at delta 0.0001 in 2 replies to fit" in said
    assert "masked: the server gets the sum, trained with noise (DP-SGD)" in said
    assert "given away by north: epsilon 4.94 at delta 0.0001 in 2 replies, of 8" in said
    ledger = [json.loads(line) for line in (tmp_path / "runs" / "wards" / "ledger.jsonl").read_text().splitlines()]
    assert {"mask_keys", "mask_shares", "fit", "mask_opening"} <= {line["step"] for line in ledger}
    for site in SITES:
        (account,) = (tmp_path / "wards" / site / "state" / ".privacy").glob("*.jsonl")
        assert sum(json.loads(line)["cost"] is not None for line in account.read_text().splitlines()) == 2
        (masks,) = (tmp_path / "wards" / site / "state").rglob("masks.json")
        left = json.loads(masks.read_text())
        assert (left["stage"], left["seed"], left["for_masks"], left["held"]) == ("opened", "", "", {})
        assert masks.stat().st_mode & 0o077 == 0
