"""Export of a saved server model for use without polyfed: weights, configuration and one program a modality.

model.safetensors       weights by name, heads included
config.json             architecture, widths, and how inputs are prepared
vocabulary.json         tokens by id, where a modality has tokens
<modality>.pt2          torch.export program: prepared inputs -> representations of unit norm
<modality>-classes.pt2  prepared inputs -> logits, where the server classifies
README.md               what this is, with an example that runs
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import RunError
from polyfed.data.view import DataContext, InputSpec
from polyfed.export.inputs import Recipe, recipe
from polyfed.export.programs import Program, write_program
from polyfed.export.readme import readme
from polyfed.models.heads import LinearHead, NonNegativeHead
from polyfed.models.model import Model
from polyfed.runs.opened import open_run
from polyfed.runs.saved import SavedModel


def export_model(
    run: Path | str,
    out: Path | str | None = None,
    *,
    which: str | None = None,
    weights_dir: Path | None = None,
) -> Path:
    """Export a run's server model; the folder appears complete, with every program checked, or not at all.

    Args:
        run: run folder.
        out: new folder; by default ``export`` in the run folder.
        which: ``best`` or ``last``; by default ``best`` if there is one.
        weights_dir: folder of pretrained weights that the architecture is built from, by default the run's.

    Returns:
        The folder.

    Raises:
        RunError: no run or model, ``out`` is not empty, or an encoder cannot be exported.
        ConfigError: the architecture needs pretrained weights that are not there.
    """
    opened, out = open_run(run, weights_dir=weights_dir, device="cpu"), Path(out) if out else Path(run) / "export"
    server = opened.server_model(which)
    saved, folder = server.saved, server.saved.folder
    with _new_folder(out) as draft:
        server.warn_if_untrained()
        parts = _Parts(saved, server.model, server.context, draft)
        programs, classes = parts.encoders(), parts.classifiers()
        recipes = parts.recipes(programs)
        config = {"experiment": opened.conditions.name, "model": server.which}
        config |= _config(saved, programs, classes, recipes)
        shutil.copyfile(folder / "model.safetensors", draft / "model.safetensors")
        (draft / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")
        (draft / "README.md").write_text(readme(config, recipes), "utf-8")
    return out


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that takes its name when the block succeeds, and of which nothing is left when it fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"'{out}' exists and is not empty; remove it or choose another --out")
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        if out.exists():
            out.rmdir()
        draft.replace(out)
    except OSError as error:
        raise RunError(f"cannot write '{out}' ({error.strerror or error}); choose another --out") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _Representation(nn.Module):
    """``Model.represent`` of one modality, without the rest of the model."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        return F.normalize(self.encoder(x).float(), dim=-1)


@dataclass(frozen=True)
class _Parts:
    """What an export into ``folder`` is made of."""

    saved: SavedModel
    model: Model
    context: DataContext
    folder: Path

    @property
    def specs(self) -> dict[str, InputSpec]:
        """Modality -> what its encoder receives."""
        encoders = self.saved.settings.encoders
        return {name: encoder.view.spec(name, self.context) for name, encoder in encoders.items()}

    def encoders(self) -> dict[str, Program]:
        """One program a modality, giving representations."""
        return {modality: self._encoder(modality, spec) for modality, spec in self.specs.items()}

    def _encoder(self, modality: str, spec: InputSpec) -> Program:
        what = f"encoder '{modality}' ({self.saved.settings.encoders[modality].component_name()})"
        module, path = _Representation(self.model.tower(modality)), self.folder / f"{_file(modality)}.pt2"
        return write_program(module, lambda x: self.model.represent(modality, x), spec, path, what)

    def classifiers(self) -> dict[str, Program]:
        """One program for each modality that the server's classifier reads, giving logits; else none."""
        head = dict(self.model.heads.items()).get(str(self.saved.config["head"]))
        if not isinstance(head, LinearHead | NonNegativeHead):
            return {}
        only = getattr(self.saved.task, "modality", None)
        read = {modality: spec for modality, spec in self.specs.items() if only in (None, modality)}
        return {modality: self._classifier(modality, spec, head) for modality, spec in read.items()}

    def _classifier(self, modality: str, spec: InputSpec, head: nn.Module) -> Program:
        def live(x: Tensor) -> Tensor:
            logits: Tensor = head(self.model.embed(modality, x))
            return logits

        module = nn.Sequential(self.model.tower(modality), head)
        path = self.folder / f"{_file(modality)}-classes.pt2"
        return write_program(module, live, spec, path, f"classifier of '{modality}'")

    def recipes(self, programs: Mapping[str, Program]) -> dict[str, Recipe]:
        """How inputs of each modality are prepared; writes the vocabularies."""
        specs = self.specs
        several = sum(bool(spec.vocabulary) for spec in specs.values()) > 1
        return {
            modality: recipe(
                encoder.view,
                specs[modality],
                modality=modality,
                context=self.context,
                folder=self.folder,
                suffix=f"-{_file(modality)}" if several else "",
                fixed_length=programs[modality].fixed_length,
            )
            for modality, encoder in self.saved.settings.encoders.items()
        }


def _file(modality: str) -> str:
    return re.sub(r"[^\w.-]", "-", modality)


def _config(
    saved: SavedModel,
    programs: Mapping[str, Program],
    classes: Mapping[str, Program],
    recipes: Mapping[str, Recipe],
) -> dict[str, Any]:
    encoders = saved.config["model"]["encoders"]
    named = (saved.config["samples"] or {}).get("classes", {})
    return {
        "round": saved.config["round"],
        "dim": saved.settings.dim,
        "task": saved.config["task"],
        "classes": named.get(getattr(saved.task, "target", "")) if classes else None,
        "modalities": {
            modality: {
                "program": program.path.name,
                "classes_program": classes[modality].path.name if modality in classes else None,
                "input": {"shape": list(program.shape), "dtype": "int64" if program.tokens else "float32"},
                "preparation": recipes[modality].facts,
                "encoder": encoders[modality],
            }
            for modality, program in programs.items()
        },
    }
