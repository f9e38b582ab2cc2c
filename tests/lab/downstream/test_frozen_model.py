from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from torch import nn

from polyfed.data.source import Source, Split
from polyfed.data.sources.hub import Hub
from polyfed.data.sources.mimic_cxr import MimicCxr
from polyfed.data.sources.parquet import Parquet
from polyfed.data.sources.questions import Questions
from polyfed.data.sources.scenes import Scenes
from polyfed.data.view import DataContext
from polyfed.lab.downstream.bench import FrozenModel
from polyfed.models.model import Model

DATA = Path("/data")


class Tones(Source):
    """A source from outside polyfed, which says nothing of what identifies it."""

    home: ClassVar[str] = Source.home
    pitch: int = 1

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        raise NotImplementedError


def knows(trained: Source, asked: Source, data_dir: Path | None = DATA) -> bool:
    model = Model({"image": nn.Linear(1, 1)}, {}, 1)
    return FrozenModel("random", model, {}, DataContext(Path()), trained_on=(trained,)).knows(asked, data_dir)


SAME: list[tuple[Source, Source]] = [
    (Parquet(path="medpix2"), Parquet(path="./medpix2")),
    (Parquet(path="medpix2"), Parquet(path="/data/medpix2")),
    (Parquet(path="medpix2"), Parquet(path="other/../medpix2/", id="image_id", where={"ok": True}, matches="text")),
    (MimicCxr(path="mimic"), MimicCxr(path="/data/mimic", views=None, labels="positive", reports="elsewhere")),
    (MimicCxr(path="mimic"), MimicCxr(path="mimic", sections=(), without_sections="none", matches=None)),
    (Scenes(seed=3), Scenes(seed=3, train=10, test=5, size=32, targets={})),
    (Hub(repository="a/b", config="c"), Hub(repository="a/b", config="c", revision="1", splits={"test": "train"})),
    (Questions(of=Parquet(path="vqa"), most=10), Parquet(path="./vqa")),
    (Questions(of=Parquet(path="vqa"), most=10), Questions(of=Parquet(path="/data/vqa"), train_split="test")),
    (Tones(pitch=2), Tones(pitch=2, columns={"sound": "tone"})),
]
OTHER: list[tuple[Source, Source]] = [
    (Parquet(path="medpix2"), Parquet(path="medpix")),
    (Parquet(path="medpix2"), Parquet(path="/elsewhere/medpix2")),
    (Parquet(path="mimic"), MimicCxr(path="mimic")),
    (Scenes(seed=3), Scenes(seed=4)),
    (Scenes(), Scenes(domain="night")),
    (Scenes(), Scenes(shift=0.5)),
    (Hub(repository="a/b", config="c"), Hub(repository="a/b", config="d")),
    (Questions(of=Parquet(path="vqa")), Questions(of=Parquet(path="other"))),
    (Tones(pitch=2), Tones(pitch=3)),
]


@pytest.mark.parametrize(("trained", "asked"), SAME)
def test_data_are_known_however_they_are_written_and_picked_from(trained: Source, asked: Source) -> None:
    assert knows(trained, asked)
    assert knows(asked, trained)


@pytest.mark.parametrize(("trained", "asked"), OTHER)
def test_other_data_are_new(trained: Source, asked: Source) -> None:
    assert not knows(trained, asked)


def test_a_link_is_the_folder_that_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "medpix2").mkdir()
    (tmp_path / "link").symlink_to("medpix2")
    assert knows(Parquet(path="medpix2"), Parquet(path="link"), tmp_path)
