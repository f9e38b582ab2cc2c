"""Errors of a deployed site at the server: the class and a number; no path, file name, text or value of the data."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_grid import DESCRIBE, MANY, STEP, Delivery, Fault, Rule
from federations_in_process import InProcess
from PIL import Image

from grids import mostly_slow
from polyfed.core.errors import DataError, PolyfedError
from polyfed.deploy.settings import SiteConfig
from small_federations import Config

MARK = "patient_Miller"
NUMBER = r"error [0-9a-f]{8} in the site's log"


def with_own_data(tiny: Config, **source: Any) -> Config:
    """The tiny experiment; the site ``image`` has images of its own in a folder."""
    own = {"name": "folder", "path": "own", "columns": {"image": "image"}, "targets": {"label": "label"}}
    tiny["data"]["sources"]["private"] = own | source
    return tiny


def pictures(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(folder / name)


def sound(data: Path, table: str = "") -> None:
    """Twelve images and their labels."""
    names = [f"{number}.png" for number in range(12)]
    pictures(data / "own", names)
    lines = [f"{name},{'ab'[number % 2]},{'train' if number < 8 else 'test'}" for number, name in enumerate(names)]
    (data / "own" / "captions.csv").write_text("file_name,label,split\n" + "\n".join(lines) + "\n" + table)


def unreadable(data: Path) -> None:
    sound(data, f"{MARK}.png,a,train\n")
    (data / "own" / f"{MARK}.png").write_bytes(b"no picture")


def of_text(text: str, name: str = "captions.csv") -> Callable[[Path], None]:
    def write(data: Path) -> None:
        pictures(data / "own", ["0.png"])
        (data / "own" / name).write_text(text)

    return write


def of_bytes(path: str) -> Callable[[Path], None]:
    def write(data: Path) -> None:
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).write_bytes(f"not a table: {MARK}".encode())

    return write


def an_unwritable_cache(data: Path) -> None:
    sound(data)
    (data.parent / "cache").write_text("a file where a folder is to be")


PARQUET = {"name": "parquet", "path": f"{MARK}"}
BROKEN: dict[str, tuple[dict[str, Any], Callable[[Path], None]]] = {
    "a row without its image": ({}, lambda data: sound(data, f"{MARK}.png,a,train\n")),
    "an unreadable image": ({}, unreadable),
    "no folder": ({"path": MARK}, lambda data: None),
    "no such column": ({}, of_text(f"file_name,{MARK}\n0.png,a\n")),
    "no such split": ({}, of_text(f"file_name,label,split\n0.png,a,{MARK}\n")),
    "broken JSON": ({}, of_text(f'{{"file_name": "0.png", "{MARK}', "captions.jsonl")),
    "broken Parquet": (PARQUET, of_bytes(f"{MARK}/train.parquet")),
    "no Parquet": (PARQUET, lambda data: (data / MARK).mkdir(parents=True)),
    "broken Arrow": ({"name": "arrow", "path": f"{MARK}.arrow"}, of_bytes(f"{MARK}.arrow")),
    "a cache that cannot be": ({}, an_unwritable_cache),
}
NOT_NAMED = ("no such column", "broken JSON", "a cache that cannot be")


class Listening:
    """Texts of a node's replies."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def rules(self, fault: Fault = lambda delivery: delivery.serve(delivery.message.content)) -> list[Rule]:
        def noted(delivery: Delivery) -> Any:
            content = fault(delivery)
            self.texts.append(repr(content.config_records))
            return content

        return [Rule(noted, kind=kind, times=MANY) for kind in (DESCRIBE, STEP)]


def everything(folder: Path) -> bytes:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    return b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)


def outcome(federation: InProcess, out: Path, **run: Any) -> str:
    """Message of the server's run to its operator."""
    try:
        federation.run(out, **run)
    except PolyfedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("broken", mostly_slow(BROKEN, *list(BROKEN)[::4]))
def test_nothing_of_data_that_cannot_be_read_leaves(
    tiny: Config, tmp_path: Path, grid_messages: None, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    source, write = BROKEN[broken]
    federation = InProcess.made(tmp_path / "federation", with_own_data(tiny, **source))
    path = f"data/{source.get('path', 'own')}"
    federation.edit("image", {"data": {"sources": {"private": {"path": path}}, "cache_dir": "cache"}})
    write(federation.folder / "image" / "data")
    heard = Listening()
    federation.grid.rules = heard.rules()
    output = outcome(federation, tmp_path / "run")
    assert re.search(rf"\w+Error: {NUMBER}", output), output
    left = "\n".join([output, *heard.texts])
    assert MARK not in left
    assert str(tmp_path) not in left
    assert MARK.encode() not in everything(tmp_path / "run")
    number = re.search(NUMBER, output)
    assert number is not None
    logged = number[0].removesuffix(" in the site's log")
    (record,) = [record for record in caplog.records if record.getMessage() == logged]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None  # the site's operator finds the text there
    assert MARK in str(record.exc_info[1]) or broken in NOT_NAMED


PLACES = [
    "polyfed.deploy.host.SiteConfig.load",
    "polyfed.deploy.host.Site.open",
    "polyfed.federation.population.Population.train",
    "polyfed.federation.population.Population.test",
    "polyfed.federation.population.Population.public_samples",
    "polyfed.federation.population.Population.client_model",
    "polyfed.federation.population.Population.infos",
    "polyfed.engines.site.Site.data_of",
    "polyfed.engines.site.Site.perform",
    "polyfed.data.samples.Samples._gathered",
    "polyfed.data.samples.Samples.batches",
    "polyfed.federation.state.StateStore.save",
    "polyfed.federation.participant.Participant.fit",
    "polyfed.tasks.classification.Classification.loss",
]


@pytest.mark.parametrize(
    ("place", "kind"),
    mostly_slow(
        [*((place, DataError) for place in PLACES), (PLACES[0], OSError), (PLACES[7], KeyError)],
        *((place, DataError) for place in PLACES[::6]),
        (PLACES[7], KeyError),
    ),
)
def test_nothing_of_an_error_leaves_wherever_it_is_raised(
    tiny: Config, tmp_path: Path, grid_messages: None, monkeypatch: pytest.MonkeyPatch, place: str, kind: Any
) -> None:
    if place.endswith("StateStore.save"):
        tiny["algorithm"] = {"name": "moon", "local_epochs": 1}
    federation = InProcess.made(tmp_path / "federation", tiny)
    heard = Listening()

    def failing(delivery: Delivery) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise kind(f"'{MARK}.png' of {tmp_path} says oedema")

        with monkeypatch.context() as patched:  # at the site, not at the server in the same process
            patched.setattr(place, property(fail) if place.endswith("infos") else fail)
            return delivery.serve(delivery.message.content)

    federation.grid.rules = heard.rules(failing)
    output = outcome(federation, tmp_path / "run", rounds=1)
    left = "\n".join([output, *heard.texts]).encode() + everything(tmp_path / "run")
    assert re.search(rf"{kind.__name__}: {NUMBER}".encode(), left)
    for hidden in (MARK, str(tmp_path), "oedema", "Traceback"):
        assert hidden.encode() not in left


def test_a_refusal_contains_the_sites_demand(tiny: Config, tmp_path: Path, grid_messages: None) -> None:
    federation = InProcess.made(tmp_path / "federation", tiny)
    federation.edit("image", {"demands": {"weights": "never", "metrics": True}})
    output = outcome(federation, tmp_path / "run")
    assert "RefusedError: site 'image' has demands.weights: never, but 'fit' of 'fedavg' sends weights" in output


def test_a_new_site_sends_no_tracebacks(tiny: Config, tmp_path: Path) -> None:
    path = InProcess.made(tmp_path / "federation", tiny).folder / "image" / "site.yaml"
    assert yaml.safe_load(path.read_text())["tracebacks"] is False
    content = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "tracebacks"}
    path.write_text(yaml.safe_dump(content))
    assert SiteConfig.load(path).tracebacks is False
