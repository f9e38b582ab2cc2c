"""Export of adapters as folders of ``peft`` by modality: ``PeftModel.from_pretrained(network, FOLDER/MODALITY)``.

<modality>/adapter_config.json         type, ranks, adapted layers, and the pretrained network
<modality>/adapter_model.safetensors   the adapter
<modality>/projection.safetensors      new layers from the network's pooled vector to representations, if any
README.md                              model card
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from markupsafe import Markup
from safetensors.torch import save_file
from torch import Tensor

from polyfed.core.errors import RunError
from polyfed.core.version import __version__
from polyfed.data.backbones import NO_CODE, load, locate, pool_of
from polyfed.export.cards import measured_in
from polyfed.export.inputs import identifier
from polyfed.export.model import new_folder
from polyfed.models.adapters.adapter import PEFT_NAMES, LoRA, adapted_layers, merged_weights
from polyfed.models.adapters.prompts import TENSOR, Prompts, plain_ids, prompts_of
from polyfed.models.encoders.hf import HF, body_of, network_of
from polyfed.reporting.markup import markdown_templates
from polyfed.reporting.summary import component_name, setting
from polyfed.runs.opened import Run, ServerModel, as_run

_PLAIN = PEFT_NAMES["whole"]
_TINY = 1e-6  # singular values of an offset below this share of the largest do not count towards its rank


def export_adapters(run: Run | Path | str, out: Path | str | None = None, *, which: str | None = None) -> Path:
    """Export the adapters of a run's model; the folder appears complete and checked, or not at all.

    Offsets that methods have added to layers for good become further ranks of the adapter.

    Args:
        run: run folder; or a run as ``open_run`` gives it, with pretrained weights elsewhere.
        out: new folder; by default ``adapters`` in the run folder.
        which: ``best`` or ``last``; by default ``best`` if there is one.

    Returns:
        The folder.

    Raises:
        RunError: no run or model, ``out`` is not empty, no encoder has an adapter, or peft does not support one.
        ConfigError: the pretrained weights are not there.
    """
    on_cpu = replace(as_run(run), device="cpu")
    saved, out = on_cpu.server_model(which), Path(out) if out else on_cpu.folder / "adapters"
    own = saved.settings.encoders
    encoders = {name: each for name, each in own.items() if isinstance(each, HF) and each.adapter is not None}
    unsupported = [name for name, encoder in encoders.items() if not _is_supported(encoder)]
    if unsupported or not encoders:
        what = f"encoder '{unsupported[0]}' of the server has no" if unsupported else "no encoder of the server has an"
        raise RunError(
            f"'{on_cpu.folder}': {what} adapter that peft supports (lora, or prompts of whole networks of texts with "
            "place: front); export the model with --format torch or huggingface"
        )
    saved.warn_if_untrained()
    with new_folder(out) as draft:
        for modality, encoder in encoders.items():
            write = _write_prompts if isinstance(encoder.adapter, Prompts) else _write
            write(saved, modality, encoder, draft / modality)
        template = markdown_templates().get_template("adapter.md.j2")
        card = template.render(
            name=on_cpu.conditions.name,
            bases={modality: encoder.weights for modality, encoder in encoders.items()},
            method=component_name(setting(on_cpu.records.config, "algorithm")),
            rounds=saved.round,
            version=__version__,
            metrics=measured_in(on_cpu.records, saved.round),
            encoders=[_steps(saved, modality, encoder) for modality, encoder in encoders.items()],
        )
        (draft / "README.md").write_text(card, "utf-8")
    return out


def _steps(saved: ServerModel, modality: str, encoder: HF) -> dict[str, Any]:
    """Code of the model card that turns a network's states into vectors."""
    tower: Any = saved.model.encoders[modality]
    return {
        "name": identifier(modality),
        "folder": Markup(json.dumps(modality)),
        "weights": Markup(json.dumps(encoder.weights)),
        "tower": "" if encoder.tower == "whole" else encoder.tower,
        "pool": pool_of(encoder.pooling, encoder.tower),
        "masked": bool(encoder.view.spec(modality, saved.context).vocabulary),
        "prompts": encoder.adapter.length if isinstance(encoder.adapter, Prompts) else 0,
        "standardise": encoder.standardise,
        "layer": "" if encoder.projection == "own" else len(tower.project) - 1,
        "partial": encoder.pie or saved.settings.final_norm,
    }


def _is_supported(encoder: HF) -> bool:
    """True if ``peft`` supports the adapter; prompts only in front of texts, and not in one tower of several."""
    adapter = encoder.adapter
    in_front = isinstance(adapter, Prompts) and adapter.place == "front" and encoder.tower == "whole"
    return in_front or isinstance(adapter, LoRA)


def _write(saved: ServerModel, modality: str, encoder: HF, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    assert isinstance(encoder.adapter, LoRA)
    tower: Any = saved.model.encoders[modality]
    body: Any = body_of(tower)
    prefix = PEFT_NAMES[encoder.tower]
    start, config = prefix.removeprefix(_PLAIN), copy.deepcopy(body.peft_config["default"])
    config.target_modules = sorted(f"{start}{name}" for name in config.target_modules)
    config.base_model_name_or_path, config.inference_mode = encoder.weights, True
    tensors = dict(get_peft_model_state_dict(body))
    if encoder.adapter.offset:
        for name, (a, b) in _with_offsets(adapted_layers(body)).items():
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            config.rank_pattern[f"{start}{name}"] = len(a)
            config.alpha_pattern[f"{start}{name}"] = encoder.adapter.scaling * len(a)
    folder.mkdir()
    config.save_pretrained(str(folder))
    _save({f"{prefix}{name}": value for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    _write_projection(encoder, tower, folder)
    _require_equal(saved, tower, encoder, folder)


def _write_projection(encoder: HF, tower: Any, folder: Path) -> None:
    if encoder.projection == "new":
        _save(tower.get_submodule("project").state_dict(), folder / "projection.safetensors")


def _write_prompts(saved: ServerModel, modality: str, encoder: HF, folder: Path) -> None:
    from peft import PromptTuningConfig

    tower: Any = saved.model.encoders[modality]
    trunk = network_of(tower)
    values, config = prompts_of(trunk), cast("Any", trunk.backbone.body.config)
    folder.mkdir()
    PromptTuningConfig(
        task_type="FEATURE_EXTRACTION",
        base_model_name_or_path=encoder.weights,
        inference_mode=True,
        num_virtual_tokens=len(values),
        token_dim=values.shape[1],
        num_transformer_submodules=1,
        num_attention_heads=config.num_attention_heads,
        num_layers=config.num_hidden_layers,
    ).save_pretrained(str(folder))
    _save({TENSOR: values}, folder / "adapter_model.safetensors")
    _write_projection(encoder, tower, folder)
    plain, ids = _plain_network(saved, encoder, folder), torch.tensor([plain_ids(config, trunk, 3)])
    with torch.no_grad():
        states = plain(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[:, len(values) :]
        if not torch.allclose(states, trunk(ids).local, atol=1e-5):
            raise RunError(f"'{folder.name}': plain peft gives other states than the run's network does; report this")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path, {"format": "pt"})


def _with_offsets(layers: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer -> factors (A, B) of adapter and offset together."""
    joined = {}
    for name, layer in layers.items():
        u, s, v = torch.linalg.svd(layer.base_layer.offset, full_matrices=False)
        rank = int((s > _TINY * s.max()).sum())
        a = torch.cat([layer.lora_A["default"].weight, v[:rank]])
        joined[name] = a, torch.cat([layer.lora_B["default"].weight, u[:, :rank] * s[:rank]], dim=1)
    return joined


def _require_equal(saved: ServerModel, tower: Any, encoder: HF, folder: Path) -> None:
    """Raise RunError unless plain ``peft`` reads the run's weights from the folder."""
    merged = dict(_plain_network(saved, encoder, folder).merge_and_unload().named_parameters())
    start = PEFT_NAMES[encoder.tower].removeprefix(_PLAIN)
    for name, expected in merged_weights(body_of(tower)).items():
        if not torch.allclose(merged[f"{start}{name}.weight"], expected, atol=1e-5):
            raise RunError(f"'{folder.name}': plain peft reads another '{name}' than the run has; report this")


def _plain_network(saved: ServerModel, encoder: HF, folder: Path) -> Any:
    """The pretrained network with the adapter of a folder, loaded by ``peft`` alone."""
    from peft import PeftModel
    from transformers import AutoModel

    base: Any = load(locate(encoder.weights, saved.context.weights, hub=saved.context.hub), AutoModel, pooler=False)
    return PeftModel.from_pretrained(base, str(folder), **NO_CODE).eval()
