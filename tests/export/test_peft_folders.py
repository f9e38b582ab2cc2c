"""Adapters as folders of peft: plain peft reads them, and a run starts from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModel

import polyfed
from polyfed.core.errors import ConfigError, RunError
from polyfed.data.view import DataContext, InputSpec
from polyfed.export.model import export_adapters
from polyfed.models.encoders.hf import body_of
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from small_federations import Config, adapted, pretrained_folder

X = {"image": torch.randn(2, 3, 16, 16), "text": torch.tensor([[3, 4, 9, 7], [5, 6, 8, 2]])}


NETWORKS = {"image": "vit", "text": "bert"}


def trained(folder: Path, **algorithm: Any) -> Run:
    config = adapted(**algorithm)
    config["run"]["rounds"] = 2
    for group in config["clients"].values():
        group["training"] = {"optimizer": {"kind": "adam", "lr": 0.1}, "batch_size": 8}
    return polyfed.run(Experiment.load(config), folder, quiet=True)


def plain(weights: str, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModel.from_pretrained(pretrained_folder() / weights), str(adapter)).eval()


@pytest.mark.parametrize("method", [pytest.param("fedit", marks=pytest.mark.slow), "fedex_lora"])  # with offsets
def test_plain_peft_has_the_network_of_the_run(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run", name=method)
    folder = export_adapters(run, which="last")
    model = run.server_model("last").model
    for modality, x in X.items():
        with torch.no_grad():
            own = model.encoders[modality].trunk(x).pooled
            actual = plain(NETWORKS[modality], folder / modality)(x).last_hidden_state[:, 0]
        torch.testing.assert_close(actual, own, atol=1e-5, rtol=1e-5)
        bare = AutoModel.from_pretrained(pretrained_folder() / NETWORKS[modality]).eval()
        assert not torch.allclose(bare(x).last_hidden_state[:, 0], own, atol=1e-5)
    readme = (folder / "README.md").read_text()
    assert method in readme
    monkeypatch.chdir(folder)
    for name in NETWORKS.values():
        readme = readme.replace(f'("{name}")', f'("{pretrained_folder() / name}")')
    exec(readme.partition("```python\n")[2].partition("```")[0], names := dict[str, Any]())
    for modality, key in (("image", "pixel_values"), ("text", "input_ids")):
        with torch.no_grad():
            own = model.represent(modality, X[modality])
        torch.testing.assert_close(names[f"encode_{modality}"](**{key: X[modality]}), own, atol=1e-5, rtol=1e-5)
    assert (folder / "image" / "projection.safetensors").is_file()


@pytest.mark.parametrize("weights", [pytest.param("bert", marks=pytest.mark.slow), "roberta"])
def test_prompts_in_front_of_texts_go_both_ways(weights: str, tmp_path: Path) -> None:
    config = adapted(name="promptfl")
    prompts = {"name": "prompts", "length": 3, "place": "front"}
    encoder = config["clients"]["text"]["model"]["encoders"]["text"] | {"adapter": prompts, "weights": weights}
    model = config["clients"]["text"]["model"] | {"encoders": {"text": encoder}}
    text = config["clients"]["text"] | {"model": model}
    config["clients"] = {"text": text}
    config["server"] = {key: text[key] for key in ("model", "task", "source")}
    run = polyfed.run(Experiment.load(config), tmp_path / "run", quiet=True)
    folder = export_adapters(run, which="last")
    model = run.server_model("last").model
    with torch.no_grad():
        own = model.encoders["text"].trunk(X["text"]).pooled
        actual = plain(weights, folder / "text")(X["text"], attention_mask=torch.ones_like(X["text"])).last_hidden_state
    torch.testing.assert_close(actual[:, 3], own, atol=1e-6, rtol=1e-6)
    encoder["adapter"] = prompts | {"start": str(folder / "text")}
    again = Experiment.load(config).server.model.encoders["text"]  # type: ignore[union-attr]
    built: Any = again.build(8, InputSpec((16,), ("w",) * 200), DataContext(tmp_path, pretrained_folder()))
    torch.testing.assert_close(built.trunk.eval()(X["text"]).pooled, own)


def from_folder(config: Config, folder: Path, **adapter: Any) -> Config:
    for participant in (config["server"], *config["clients"].values()):
        for modality, encoder in participant["model"]["encoders"].items():
            encoder["adapter"] = encoder["adapter"] | {"start": str(folder / modality)} | adapter
    return config


@pytest.mark.slow
def test_a_run_starts_from_a_folder_of_peft(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    folder = export_adapters(run, tmp_path / "adapters", which="last")
    model = Experiment.load(from_folder(adapted(), folder)).server.model.build({}, run.server_model().context)
    for modality, x in X.items():
        with torch.no_grad():
            own, actual = (body_of(one.encoders[modality])(x) for one in (run.server_model("last").model, model.eval()))
        torch.testing.assert_close(actual.last_hidden_state, own.last_hidden_state)
    for other, message in (
        (from_folder(adapted((3,)), folder), "differs from the settings, first at"),
        (from_folder(adapted(), Path("nowhere")), r"adapter\.start: no folder"),
    ):
        settings = Experiment.load(other).server.model
        with pytest.raises(ConfigError, match=message):
            settings.build({}, run.server_model().context)


def test_a_run_without_adapters_has_none_to_export(tiny_run: Path) -> None:
    with pytest.raises(RunError, match="no encoder of the server has an adapter that peft supports"):
        export_adapters(tiny_run)
    assert not (tiny_run / "adapters").exists()


@pytest.mark.parametrize(
    "adapter", [pytest.param("attention", marks=pytest.mark.slow), {"name": "prompts", "length": 2}]
)
def test_an_adapter_that_peft_has_no_form_for_is_not_left_out(adapter: Any, tmp_path: Path) -> None:
    config = adapted(name="fedavg", averaging="by_type")
    config["run"]["rounds"] = 1
    for participant in (config["server"], *config["clients"].values()):
        if text := participant["model"]["encoders"].get("text"):
            participant["model"]["encoders"]["text"] = text | {"adapter": adapter}
    run = polyfed.run(Experiment.load(config), tmp_path / "run", quiet=True)
    message = r"encoder 'text' of the server has no adapter that peft supports .* --format torch"
    with pytest.raises(RunError, match=message):
        export_adapters(run)
    assert not (run.folder / "adapters").exists()
