"""Export of a saved model for use without polyfed: programs, a folder of the Hugging Face hub, or adapters.

Programs:

run.py                  runs it on images and texts
model.safetensors       weights by name, heads included
config.json             architecture, widths, and how inputs are prepared
tokenizer.json          file of the library ``tokenizers``, where a modality has tokens
<modality>.pt2          torch.export program: prepared inputs -> representations of unit norm
<modality>-classes.pt2  prepared inputs -> logits, where the server classifies images, texts or pixels
README.md               description, with an example that runs

They hold the pretrained networks of the run too, also those of which it cached the features.

Hugging Face, with code that needs torch and transformers:

config.json             widths, modalities, and names, shapes and types of the tensors
modeling_polyfed.py     the networks, written out operation by operation from their traced programs
model.safetensors       all tensors, also those that are not trained
tokenizer.json          of the library ``tokenizers``, where a modality has tokens
README.md               model card: data, method, metrics, federation, privacy

Adapters of ``peft`` by modality, for ``PeftModel.from_pretrained(network, FOLDER/MODALITY)``:

<modality>/adapter_config.json         type, ranks, adapted layers, and the pretrained network
<modality>/adapter_model.safetensors   the adapter
<modality>/projection.safetensors      new layers from the network's pooled vector to representations, if any
README.md                              model card
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from markupsafe import Markup
from safetensors.torch import save_file
from torch import Tensor, fx

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import write_atomically
from polyfed.core.tensor_files import tensor_blocks
from polyfed.core.version import __version__
from polyfed.data.backbones import NO_CODE, load, locate, pool_of
from polyfed.data.view import InputSpec
from polyfed.export.cards import measured_in, model_card, readme, run_file
from polyfed.export.inputs import Recipe, identifier, import_lines, recipe
from polyfed.export.programs import Program, on_raw_inputs, write_program
from polyfed.models.adapters.adapter import (
    PEFT_NAMES,
    TENSOR,
    LoRA,
    Prompts,
    adapted_layers,
    merged_weights,
    plain_ids,
    prompts_of,
)
from polyfed.models.decoders import MaskHead
from polyfed.models.encoders.hf import HF, body_of, network_of
from polyfed.models.heads import LinearHead, NonNegativeHead
from polyfed.models.model import Model
from polyfed.reporting.markup import markdown_templates, resource
from polyfed.reporting.summary import component_name, setting
from polyfed.runs.opened import Run, ServerModel, as_run
from polyfed.tasks.imputations import LeaveOut
from polyfed.tasks.segmentation import Segmentation

_CODE = "modeling_polyfed"
_KNOWN = {"torch", "device", "inf", "nan", "fx_pytree", "pytree", "NoneType", "math", "operator", "_operator"}
_PLAIN = PEFT_NAMES["whole"]
_TINY = 1e-6  # singular values of an offset below this share of the largest do not count towards its rank


def export_model(run: Run | Path | str, out: Path | str | None = None, *, which: str | None = None) -> Path:
    """Export a run's model; the folder appears complete, with every program checked, or not at all.

    Args:
        run: run folder; or a run as ``open_run`` gives it, with pretrained weights elsewhere.
        out: new folder; by default ``export`` in the run folder.
        which: ``best`` or ``last``; by default ``best`` if there is one.

    Returns:
        The folder.

    Raises:
        RunError: no run or model, ``out`` is not empty, or an encoder cannot be exported.
        ConfigError: the architecture needs pretrained weights that are not there.
    """
    on_cpu = replace(as_run(run), device="cpu")
    out = Path(out) if out else on_cpu.folder / "export"
    with new_folder(out) as draft:
        exported = export_programs(on_cpu, draft, which)
        save_file(dict(exported.saved.weights), draft / "model.safetensors", {"format": "pt"})
        (draft / "config.json").write_text(json.dumps(exported.config, indent=1, ensure_ascii=False) + "\n", "utf-8")
        (draft / "README.md").write_text(readme(exported.config, exported.recipes), "utf-8")
        (draft / "run.py").write_text(run_file(exported.config, exported.recipes), "utf-8")
    return out


@dataclass(frozen=True)
class Exported:
    """A run's model as programs, and their description.

    Attributes:
        saved: the model as the run keeps it.
        programs, recipes: programs and preparations of inputs, by modality.
        config: content of ``config.json``.
    """

    saved: ServerModel
    programs: Mapping[str, Program]
    recipes: Mapping[str, Recipe]
    config: Mapping[str, Any]


def export_programs(run: Run, folder: Path, which: str | None) -> Exported:
    """Write the programs of a run's model, each checked, and the files that preparing inputs takes.

    Raises:
        RunError, ConfigError: see ``export_model``.
    """
    saved = run.server_model(which)
    model, context = saved.model, saved.context
    saved.warn_if_untrained()
    views = on_raw_inputs(model, saved.views, context)
    specs = {name: view.spec(name, context) for name, view in views.items()}
    programs = {}
    for name, spec in specs.items():
        what = f"encoder '{name}' ({saved.settings.encoders[name].component_name()})"
        represent, path = partial(model.represent, name), folder / f"{_file(name)}.pt2"
        programs[name] = write_program(represent, [model.tower(name)], spec, path, what)
    classes = _classifiers(saved, model, specs, folder)
    several = sum(bool(spec.vocabulary) for spec in specs.values()) > 1
    recipes = {}
    for name, view in views.items():
        suffix, length = f"-{_file(name)}" if several else "", programs[name].fixed_length
        recipes[name] = recipe(
            view, specs[name], modality=name, context=context, folder=folder, suffix=suffix, fixed_length=length
        )
    config = {"experiment": run.conditions.name, "model": saved.which}
    return Exported(saved, programs, recipes, config | _config(saved, programs, classes, recipes))


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that takes its name when the block succeeds, and of which nothing is left when it fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"'{out}' exists and is not empty; remove it or choose another --out")
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        # not every system renames a folder onto an empty one
        if out.exists():
            out.rmdir()
        draft.replace(out)
    except OSError as error:
        raise RunError(f"cannot write '{out}' ({error.strerror or error}); choose another --out") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _classifiers(saved: ServerModel, model: Model, specs: Mapping[str, InputSpec], folder: Path) -> dict[str, Program]:
    """One program giving logits for each modality that the server's classifier reads; other heads give none."""
    head, read = saved.head, [name for name in specs if getattr(saved.task, "modality", None) in (None, name)]
    if not isinstance(head, MaskHead | LinearHead | NonNegativeHead):
        return {}
    imputation = getattr(saved.task, "imputation", None)
    if len(specs) > 1 and imputation is not None and not isinstance(imputation, LeaveOut):
        raise ConfigError(
            f"the classifier of one modality fills in for the others (task.imputation {imputation.component_name()}), "
            "which no program of one input does; export as hugging-face, or train with imputation drop"
        )

    def logits(modality: str, x: Tensor) -> Tensor:
        features = model.positions(modality, x)[0] if isinstance(head, MaskHead) else model.embed(modality, x)
        scores: Tensor = head(features)
        return scores

    noun, programs = "decoder" if isinstance(head, MaskHead) else "classifier", dict[str, Program]()
    for name in read:
        path, what = folder / f"{_file(name)}-classes.pt2", f"{noun} of '{name}'"
        programs[name] = write_program(partial(logits, name), [model.tower(name), head], specs[name], path, what)
    return programs


def _file(modality: str) -> str:
    return re.sub(r"[^\w.-]", "-", modality)


def _option(modality: str, recipes: Mapping[str, Recipe]) -> str:
    """Option of ``run.py``: ``--images`` or ``--texts`` where no other modality takes these, else its name."""
    takes = recipes[modality].takes
    is_sole = takes != "numbers" and [each.takes for each in recipes.values()].count(takes) == 1
    return {"pictures": "--images", "texts": "--texts"}[takes] if is_sole else f"--{identifier(modality)}"


def _config(
    saved: ServerModel, programs: Mapping[str, Program], classes: Mapping[str, Program], recipes: Mapping[str, Recipe]
) -> dict[str, Any]:
    encoders, needs = saved.config["model"]["encoders"], [name for one in recipes.values() for name in one.packages]
    named_networks = filter(None, (each.get("weights") or each["view"].get("backbone") for each in encoders.values()))
    networks = [Path(name).name if Path(name).is_absolute() else name for name in named_networks]
    task, named = saved.task, (saved.config["samples"] or {}).get("classes", {})
    names = None
    if classes:
        names = list(task.names) if isinstance(task, Segmentation) else named.get(task.class_targets[0])
    return {
        "round": saved.config["round"],
        "dim": saved.settings.dim,
        "task": saved.config["task"],
        "classes": names,
        "needs": ["torch", *dict.fromkeys(needs)],
        "networks": [*dict.fromkeys(networks)],
        "modalities": {
            modality: {
                "program": program.path.name,
                "classes_program": classes[modality].path.name if modality in classes else None,
                "input": {"shape": list(program.shape), "dtype": "int64" if program.tokens else "float32"},
                "takes": recipes[modality].takes,
                "option": _option(modality, recipes),
                "preparation": recipes[modality].facts,
                "encoder": encoders[modality],
            }
            for modality, program in programs.items()
        },
    }


def export_hugging_face(run: Run | Path | str, out: Path | str | None = None, *, which: str | None = None) -> Path:
    """Export a run's model as a Hugging Face folder; it appears complete and checked, or not at all.

    ``AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`` loads it, offline and without polyfed.

    Args:
        run: run folder; or a run as ``open_run`` gives it, with pretrained weights elsewhere.
        out: new folder; by default ``hugging-face`` in the run folder.
        which: ``best`` or ``last``; by default ``best`` if there is one.

    Returns:
        The folder.

    Raises:
        RunError: see ``export_model``; or an encoder cannot be written as code.
        ConfigError: pretrained weights are not there.
    """
    on_cpu = replace(as_run(run), device="cpu")
    out = Path(out) if out else on_cpu.folder / "hugging-face"
    with new_folder(out) as draft, tempfile.TemporaryDirectory() as place:
        exported = export_programs(on_cpu, Path(place), which)
        _write_code(exported, Path(place), draft)
        (draft / "README.md").write_text(model_card(on_cpu.records, exported.config, exported.recipes), "utf-8")
    return out


def _write_code(exported: Exported, programs: Path, draft: Path) -> None:
    tensors: dict[str, Tensor] = {}
    functions, types = [], {}
    for modality, program in exported.programs.items():
        name = identifier(modality)
        code, own = network_code(torch.export.load(program.path).module(check_guards=False), name)
        functions.append(code)
        types[name] = {key: [list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in own.items()}
        tensors |= {f"networks.{name}.{key}": value for key, value in own.items()}
    write_atomically(draft / "model.safetensors", tensor_blocks(tensors, {"format": "pt"}))
    config = {
        "architectures": ["PolyfedModel"],
        "auto_map": {"AutoConfig": f"{_CODE}.PolyfedConfig", "AutoModel": f"{_CODE}.PolyfedModel"},
        "model_type": "polyfed",
        "dtype": "float32",
        "tensors": types,
        "needs": ["transformers", *exported.config["needs"]],
        **{key: exported.config[key] for key in ("experiment", "model", "round", "dim", "networks")},
        "modalities": {
            identifier(name): {key: entry[key] for key in ("input", "takes", "preparation")}
            for name, entry in exported.config["modalities"].items()
        },
    }
    (draft / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (draft / f"{_CODE}.py").write_text(_modeling(exported.recipes, functions), "utf-8")
    for path in programs.iterdir():  # tokenizers and vocabularies
        if path.name.startswith(("tokenizer", "vocabulary")):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, draft / path.name)


def network_code(module: fx.GraphModule, name: str) -> tuple[str, dict[str, Tensor]]:
    """A traced network as the source of a function of its tensors by name and an input, and these tensors.

    Raises:
        RunError: it has operations that cannot be written so.
    """
    # these checks name the trace's device
    for node in [node for node in module.graph.nodes if "_assert_tensor_metadata" in str(node.target)]:
        module.graph.erase_node(node)
    targets = {str(node): str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    values = {path: attrgetter(path)(module) for path in targets.values()}
    written = module.graph.python_code("self")
    tensors = {path: value for path, value in values.items() if isinstance(value, Tensor)}
    odd = [path for path in values if path not in tensors]
    odd += [key for key in written.globals if key.split(".")[0] not in _KNOWN]
    if odd:
        raise RunError(f"encoder '{name}' cannot be written as code, for {', '.join(odd)}; choose another format")
    lines = filter(None, (_rewritten(line, targets) for line in written.src.splitlines()))
    return "\n".join([f"def network_{name}(tensors, x):", "    place = x.device", *lines]), tensors


def _rewritten(line: str, targets: Mapping[str, str]) -> str:
    """A line of traced code with tensors by their names and plain input and output; empty: left out."""
    if given := re.match(r"\s+(\w+), = fx_pytree\.", line):
        return "" if given[1] == "x" else f"    {given[1]} = x"
    assigned = re.match(r"\s+(\w+) = (?:self\.|getattr\()", line)
    if assigned and assigned[1] in targets:
        return f'    {assigned[1]} = tensors["{targets[assigned[1]]}"]'
    if returned := re.match(r"\s+return pytree\.tree_unflatten\(\((\w+),\), self\._out_spec\)", line):
        return f"    return {returned[1]}"
    return line.replace("device(type='cpu')", "place") if re.match(r" {4}\S", line) else ""


def _modeling(recipes: Mapping[str, Recipe], functions: list[str]) -> str:
    """Code of the file: preparation of inputs, the networks, and the model around them."""
    prepares = [*dict.fromkeys(one.functions.strip() for one in recipes.values() if one.functions)]
    for modality, one in recipes.items():
        code = one.code.strip().replace("def PREPARE(", f"def prepare_{identifier(modality)}(")
        code = code.replace("):", ", place):", 1)
        # files lie next to the weights, in a folder or on the hub
        code = re.sub(r'Tokenizer\.from_file\(("[^"]+")\)', r"Tokenizer.from_file(cached_file(place, \1))", code)
        code = re.sub(r'from_pretrained\(("[^"]+"),', r"from_pretrained(place, subfolder=\1,", code)
        prepares.append(code)
    names = [identifier(modality) for modality in recipes]
    tables = [
        "PREPARATIONS = {" + ", ".join(f'"{name}": prepare_{name}' for name in names) + "}",
        "NETWORKS = {" + ", ".join(f'"{name}": network_{name}' for name in names) + "}",
    ]
    head, tail = resource("modeling.txt").split("# ---- networks\n")
    head = head.replace("# ---- imports\n", "\n".join(import_lines(recipes)) + "\n").rstrip()
    return "\n\n\n".join([head, *prepares, *functions, "\n".join(tables), tail.strip()]) + "\n"


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
            write = _write_prompts if isinstance(encoder.adapter, Prompts) else _write_lora
            write(saved, modality, encoder, draft / modality)
        card = (
            markdown_templates()
            .get_template("adapter.md.j2")
            .render(
                name=on_cpu.conditions.name,
                bases={modality: encoder.weights for modality, encoder in encoders.items()},
                method=component_name(setting(on_cpu.records.config, "algorithm")),
                rounds=saved.round,
                version=__version__,
                metrics=measured_in(on_cpu.records, saved.round),
                encoders=[_steps(saved, modality, encoder) for modality, encoder in encoders.items()],
            )
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


def _write_lora(saved: ServerModel, modality: str, encoder: HF, folder: Path) -> None:
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
