"""Export of a saved model for use without polyfed: weights, configuration and one program per modality.

run.py                  runs it on images and texts
model.safetensors       weights by name, heads included
config.json             architecture, widths, and how inputs are prepared
tokenizer.json          file of the library ``tokenizers``, where a modality has tokens
<modality>.pt2          torch.export program: prepared inputs -> representations of unit norm
<modality>-classes.pt2  prepared inputs -> logits, where the server classifies images, texts or pixels
README.md               description, with an example that runs

Programs hold the pretrained networks of the run too, also those of which it cached the features.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from polyfed.core.errors import ConfigError, RunError
from polyfed.data.view import InputSpec
from polyfed.export.cards import readme, run_file
from polyfed.export.inputs import Recipe, identifier, recipe
from polyfed.export.programs import Program, on_raw_inputs, write_program
from polyfed.models.decoders import MaskHead
from polyfed.models.heads import LinearHead, NonNegativeHead
from polyfed.models.model import Model
from polyfed.runs.opened import Run, ServerModel, as_run
from polyfed.tasks.imputations import LeaveOut
from polyfed.tasks.segmentation import Segmentation


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
    recipes = {
        name: recipe(
            view,
            specs[name],
            modality=name,
            context=context,
            folder=folder,
            suffix=f"-{_file(name)}" if several else "",
            fixed_length=programs[name].fixed_length,
        )
        for name, view in views.items()
    }
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

    what = "decoder" if isinstance(head, MaskHead) else "classifier"
    return {
        name: write_program(
            partial(logits, name),
            [model.tower(name), head],
            specs[name],
            folder / f"{_file(name)}-classes.pt2",
            f"{what} of '{name}'",
        )
        for name in read
    }


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
