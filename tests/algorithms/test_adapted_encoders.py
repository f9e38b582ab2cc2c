"""Methods over public data on pretrained encoders with adapters: what learns, and what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import Experiment, open_run, run
from polyfed.export.model import export_model
from small_federations import adapted

pytest.importorskip("peft", reason="peft is not installed")

METHODS: dict[str, Any] = {"creamfl": {}, "fedafd": {}, "change_distillation": {"warmup_rounds": 0}, "fedmd": {}}


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name == "creamfl" else pytest.mark.slow) for name in METHODS]
)
def test_adapters_learn_and_networks_stay(method: str, tmp_path: Path) -> None:
    config = adapted(name=method, **METHODS[method]) | {"public": {"source": "scenes", "items": 6}}
    run(Experiment.load(config), tmp_path / "run", quiet=True)
    after = open_run(tmp_path / "run").server_model("last").model.exchanged()
    learnt = [value for name, value in after.items() if ".lora_B." in name]  # zero at first
    assert learnt
    assert all(value.abs().max() > 0 for value in learnt)
    assert all(".lora_" in name or ".trunk." not in name for name in after)


@pytest.mark.slow  # onnx takes its time
def test_onnx_has_the_adapters_in_it(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    config = adapted()
    config["clients"]["paired"]["training"]["optimizer"]["lr"] = 0.3
    run(Experiment.load(config), tmp_path / "run", quiet=True)
    out = export_model(tmp_path / "run", tmp_path / "out", which="last", onnx=True)
    server = open_run(tmp_path / "run").server_model("last").model.eval()
    x = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    (result,) = ort.InferenceSession(out / "image.onnx").run(None, {"input": x.numpy()})
    with torch.no_grad():
        expected = server.represent("image", x)
        for name, value in server.exchanged(live=True).items():
            if ".lora_B." in name:
                value.zero_()
        untouched = server.represent("image", x)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert (expected - untouched).abs().max() > 1e-3
