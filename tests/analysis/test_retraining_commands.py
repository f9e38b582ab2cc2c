from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyfed.analysis.retraining_tables import write_csv
from polyfed.core.errors import RunError

Cli = Callable[..., tuple[int, str, str]]


def written(name: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    with Image.open(f"there/{name}.png") as image:
        assert image.format == "PNG"
    rows = list(csv.DictReader(Path(f"there/{name}.csv").read_text().splitlines()))
    return dict(json.loads(Path(f"there/{name}.json").read_text())), rows


def test_retrain_command(cli: Cli, fedavg_run: Path) -> None:
    arguments = ("--layers", "shallow", "--depth", "image=2,text=1", "--on", "union", "--steps", 2)
    code, out, err = cli("retrain", fedavg_run, *arguments, "--out", "there")
    assert (code, err) == (0, "")
    assert "run: R@1 at each client" in out
    content, rows = written("retrain-server-shallow-union-depthimage=2,text=1-steps2")
    assert (content["layers"], content["depth"], content["steps"]) == ("shallow", {"image": 2, "text": 1}, 2)
    assert [(row["of"], row["on"], row["client"]) for row in rows][::4] == [
        ("server", "union", "paired-0"),
        ("server", "union", "paired-1"),
    ]
    assert float(rows[0]["change"]) == float(rows[0]["after"]) - float(rows[0]["before"])
    assert content["rows"][0]["after"]["paired-0"]["R@1"] == float(rows[0]["after"])


def test_distortion_command(cli: Cli, fedavg_run: Path) -> None:
    code, out, err = cli("distortion", fedavg_run, "--steps", 1, "--lr", 0.001, "--seed", 3, "--out", "there")
    assert (code, err) == (0, "")
    assert "distortion by local training" in out
    content, rows = written("distortion-steps1-lr0.001-seed3")
    assert content["steps"] == {"paired-0": 1, "paired-1": 1}
    assert {row["figure"] for row in rows} == {"similarity", "R@1", "R@5", "R@10", "gallery"}
    found = {(row["trained"], row["client"]): -float(row["change"]) for row in rows if row["figure"] == "similarity"}
    assert found["paired-1", "paired-0"] == pytest.approx(content["decrease"]["paired-1"]["paired-0"])


def test_across_command(cli: Cli, local_run: Path) -> None:
    code, out, err = cli("across", local_run, "--out", "there")
    assert (code, err) == (0, "")
    assert "disparity" in out
    content, rows = written("across")
    assert content["server_untrained"] is True
    assert len(rows) == 4 * 2 * 4 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("retrain", "RUN", "--depth", "two"), "--depth two: 'two' says not how many layers"),
        (("retrain", "RUN", "--depth", "image=x"), "--depth image=x: 'image=x' says not how many layers"),
        (("retrain", "RUN", "--layers", "top"), "--layers top; "),
        (("retrain", "RUN", "--of", "paired-0"), "has no model of that name"),
        (("distortion", "RUN", "--of", "image"), "encodes 'image' only"),
        (("distortion", "nothing"), "is no run folder"),
        (("across", "RUN", "--model", "worst"), "has no model 'worst'"),
    ],
)
def test_bad_input_is_named(cli: Cli, fedavg_run: Path, arguments: tuple[str, ...], message: str) -> None:
    places = {"RUN": str(fedavg_run)}
    code, out, err = cli(*(places.get(argument, argument) for argument in arguments), "--out", "there")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(Path("there").glob("*")) if Path("there").exists() else True


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("a file")
    with pytest.raises(RunError, match="cannot write"):
        write_csv(tmp_path / "none" / "there.csv", ("a",), [(1,)])
