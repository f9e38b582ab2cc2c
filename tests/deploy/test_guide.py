"""The guides of docs, done literally: a server and three sites on loopback train a model together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from federations import outside, recorded, recording
from guide import Block, Guide, blocks, carried_out

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "tutorials" / "three-sites.md"


@pytest.mark.slow
def test_the_guide_works_as_it_stands(tmp_path: Path) -> None:
    message = carried_out(PAGE, tmp_path, **recording(tmp_path / "records"))
    shown = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    assert shown in (tmp_path / "consortium.yaml").read_text()
    assert outside(recorded(tmp_path / "records")) == [], "training looks up nothing and stays on loopback"
    rows = [json.loads(line) for line in (tmp_path / "runs" / "consortium" / "metrics.jsonl").read_text().splitlines()]
    assert {"north", "south", "west"} <= {str(value) for row in rows for value in row.values()}
    assert "equal to runs/desk: metrics.jsonl and all weights of models" in message


@pytest.mark.slow
def test_the_guide_to_masked_sums_works_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="opacus is not installed")
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    message = carried_out(DOCS / "how-to" / "masked-sums-at-sites.md", tmp_path)
    assert "demands.plan: exact; the planned run meets it" in message
    assert "planned for north: epsilon 4.94 at delta 0.0001 in 2 replies to fit" in message
    assert "masked: the server gets the sum, trained with noise (DP-SGD)" in message
    assert "spent by north: epsilon 4.94 at delta 0.0001 in 2 replies, of 8" in message
    ledger = [json.loads(line) for line in (tmp_path / "runs" / "wards" / "ledger.jsonl").read_text().splitlines()]
    assert {"mask_keys", "mask_shares", "fit", "mask_opening"} <= {line["step"] for line in ledger}
    for site in ("north", "south", "coast"):
        (account,) = (tmp_path / "wards" / site / "state" / ".privacy").glob("*.jsonl")
        assert sum(json.loads(line)["cost"] is not None for line in account.read_text().splitlines()) == 2
        (masks,) = (tmp_path / "wards" / site / "state").rglob("masks.json")
        left = json.loads(masks.read_text())
        assert (left["stage"], left["seed"], left["for_masks"], left["held"]) == ("opened", "", "", {})
        assert masks.stat().st_mode & 0o077 == 0


def test_the_page_names_three_sites_and_a_server() -> None:
    terminals = [block for block in blocks(PAGE.read_text(encoding="utf-8")) if block.terminal]
    assert [block.terminal for block in terminals] == ["server", "north", "south", "west"]
    assert all(f"federation/{block.terminal}" in block.code for block in terminals)


# ---- the runner itself


def test_blocks_are_found_in_order_and_ports_are_replaced() -> None:
    page = "x\n```bash\na 9443\n```\n```yaml\nno: 1\n```\n<!-- terminal: t; ready: it is up -->\n```bash\nb 19443\n```"
    assert blocks(page, {"9443": "7"}) == [Block("a 7\n"), Block("b 19443\n", "t", "it is up")]


def test_a_block_that_fails_fails_with_its_output(tmp_path: Path) -> None:
    with Guide(tmp_path, {}) as guide, pytest.raises(AssertionError, match="spoken before"):
        guide.carry_out(Block("echo spoken before\nfalse\necho never"))
    assert "never" not in guide.output()
