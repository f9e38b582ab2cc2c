"""From ``init`` to the last command that a run prints, from its folder and from elsewhere; all paths are relative."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import BertConfig, BertModel

from polyfed import load_model, open_run
from polyfed.reporting.summary import RunSummary
from polyfed.runs.config_files import START
from tiny_networks import SIZES, TEXTS, save


def project(folder: Path) -> Path:
    """Captioned images and pretrained networks below a folder."""
    photos = folder / "photos"
    photos.mkdir(parents=True)
    for number in range(60):
        Image.new("RGB", (32, 32), (4 * number, 255 - 4 * number, 70)).save(photos / f"{number}.png")
    lines = (f"{number}.png,w{number % 26} w{3 * number % 26} image {number}" for number in range(60))
    (photos / "captions.csv").write_text("file_name,caption\n" + "\n".join(lines))
    save("vit", folder / "weights")
    save("bert", folder / "weights", BertModel(BertConfig(**SIZES, **TEXTS | {"max_position_embeddings": 32})))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("written", ["by init", "by hand"])
def test_every_command_that_a_run_prints_works_from_its_folder_and_from_elsewhere(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str
) -> None:
    work = project(tmp_path / "shop")
    monkeypatch.chdir(work)
    for variable in ("POLYFED_DATA", "POLYFED_WEIGHTS"):
        monkeypatch.delenv(variable, raising=False)
    encoders = ("--image-encoder", "vit", "--text-encoder", "bert", "--method", "creamfl")
    given = ("--pairs", "photos", "--weights-dir", "weights", "--clients", 1, "--rounds", 2, "--public-share", 0.2)
    assert cli("init", "shop.yaml", *given, *encoders)[0] == 0
    text = Path("shop.yaml").read_text()
    if written == "by hand":
        text = text.replace(json.dumps(str(work / "weights")), "weights\n  dir: .")
        text = text.replace(json.dumps(str(work / "photos")), "photos")
        assert str(work) not in text
    Path("shop.yaml").write_text(text)
    code, _, err = cli("run", "shop.yaml", "--set", "run.threads=1", "--out", "runs/shop")
    assert code == 0, err
    written_files = [path for path in Path("runs").rglob("*") if path.is_file() and path.name != START]
    assert not [path for path in written_files if str(work).encode() in path.read_bytes()]

    def printed(folder: Path) -> list[list[str]]:
        summary = RunSummary(open_run(folder).records)
        return [shlex.split(command)[1:] for _, command in summary.next_steps(folder)]

    def all_work(folder: Path) -> None:
        commands = [*printed(folder), ["gallery", str(folder), "--queries", "1"], ["watch", str(folder)]]
        assert {words[0] for words in commands} == {"run", "evaluate", "export", "gallery", "watch"}
        for words in commands:
            code, _, err = cli(*words)
            assert code == 0, (words, err)
        assert load_model(folder).encode(texts=["w1 w2"]).shape == (1, 128)

    all_work(Path("runs/shop"))
    Path("runs/shop-server-only").rename("first-twin")
    Path("runs/shop/export").rename("first-export")
    monkeypatch.chdir("/")
    all_work(work / "runs" / "shop")
    for name in ("config.yaml", "metrics.jsonl"):
        assert (work / "first-twin" / name).read_bytes() == (work / "runs/shop-server-only" / name).read_bytes()
