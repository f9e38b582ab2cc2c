"""Pages and exports of a run with modalities that are neither images nor texts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import polyfed
from polyfed.core.errors import ConfigError
from polyfed.data.sounds import wav
from polyfed.export.model import export_model
from polyfed.reporting.gallery import gallery_entry, write_gallery
from polyfed.reporting.metrics import chance_of, find_recalls
from polyfed.reporting.summary import RunSummary
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from small_federations import four_modalities

METRICS = {
    **{"retrieval-1_r1_sum": 40.0, "retrieval-1_image_to_text_r@1": 10.0, "retrieval-1_text_to_image_r@1": 30.0},
    **{"retrieval-1_gallery_text": 50.0, "retrieval-1_image_to_text_positives_per_query": 5.0},
    **{"retrieval-1_gallery_image": 10.0, "retrieval-1_text_to_image_positives_per_query": 1.0},
    **{"retrieval-2_audio_to_image_r@1": 20.0, "retrieval-2_gallery_image": 10.0},
    "retrieval-2_audio_to_image_positives_per_query": 1.0,
}


def test_recalls_of_several_tasks_have_the_galleries_of_their_own() -> None:
    assert [(one.direction, one.gallery, one.task) for one in find_recalls(METRICS)] == [
        ("image to text", 50, "retrieval-1_"),
        ("text to image", 10, "retrieval-1_"),
        ("audio to image", 10, "retrieval-2_"),
    ]
    assert chance_of("retrieval-1_r1_sum", METRICS) == pytest.approx(20)
    assert chance_of("retrieval-2_audio_to_image_r@1", METRICS) == pytest.approx(10)


def test_a_value_is_shown_by_what_it_is() -> None:
    tone = np.sin(np.arange(800) / 3).astype(np.float32)
    heard = gallery_entry(wav(tone, 8000), playable=True)
    assert heard.image.startswith("data:image/png")
    assert heard.sound.startswith("data:audio/wav")
    assert not gallery_entry({"array": tone, "sampling_rate": 8000}).sound
    row = {"age": 2.5, "sex": "F", "weight": None, "x": [1, 2]}
    assert gallery_entry(row).text == "age 2.5, sex F, weight -, x 2 values"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = four_modalities(name="fedavg")
    config["run"] |= {"rounds": 1, "output": {"plots": True}}
    config["data"]["sources"]["scenes"]["test"] = 17  # sounds are encoded in blocks of 16
    return polyfed.run(Experiment.parse(config), tmp_path_factory.mktemp("four") / "run", quiet=True)


@pytest.mark.slow
def test_the_gallery_has_sounds_and_rows(finished: Run) -> None:
    page = write_gallery(finished, queries=1, k=2).read_text()
    assert page.count("<audio controls") == 1
    assert "things 2" in page or "things 3" in page
    assert "<h3>server: audio</h3>" in page


@pytest.mark.slow
def test_the_report_and_its_headline_know_the_galleries(finished: Run) -> None:
    polyfed.report(finished)
    assert not math.isnan(RunSummary(finished.records).headline.chance)


@pytest.mark.slow
def test_models_take_and_export_what_they_were_trained_on(finished: Run, tmp_path: Path) -> None:
    model = finished.model_of("server")
    values = finished.federation.data.split("scenes", "test").modality("table").values.to_pylist()
    sounds = finished.federation.data.split("scenes", "test").modality("audio").values.to_pylist()
    assert model.encode_modality("table", values).shape == (17, 64)
    assert model.encode_modality("audio", [sound["bytes"] for sound in sounds]).shape == (17, 64)
    out = export_model(finished, tmp_path / "out")
    program = torch.export.load(out / "table.pt2").module()
    server = finished.experiment.server
    width = server.model.encoders["table"].view.spec("table", finished.federation.data.context).shape[1]
    assert program(torch.zeros(2, 6, width)).shape == (2, 64)
    assert "mel" in (out / "README.md").read_text()
    loaded = polyfed.load_model(out, allow_code=True).encode_modality("table", values)
    np.testing.assert_allclose(loaded, model.encode_modality("table", values), atol=1e-5)
    with pytest.raises(ConfigError, match="has no encoder of texts"):
        finished.model_of("audio").search("a red square", ["a.png"])
