"""Saved server models: weights as safetensors, and a configuration that says how to rebuild and feed them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from polyfed.errors import RunError
from polyfed.experiment import Experiment
from polyfed.federation.server import Server
from polyfed.runfolder import RunFolder


@dataclass(frozen=True)
class SavedModel:
    """A server model on disk: its weights and what its ``config.json`` says."""

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]


def save_model(folder: RunFolder, name: str, server: Server, experiment: Experiment) -> None:
    """Write the server's model below a run folder; nothing if the federation has none."""
    if not server.has_model or experiment.server is None:
        return
    config = {
        "round": server.clock.round,
        "model": experiment.server.model.model_dump(mode="json"),
        "task": experiment.server.task.model_dump(mode="json"),
        "head": server.head_name,
    }
    folder.save_tensors(f"{name}/model.safetensors", server.model.state_dict(), {"format": "pt"})
    folder.write(f"{name}/config.json", json.dumps(config, indent=1) + "\n")


def load_model(folder: Path) -> SavedModel:
    """Read what ``save_model`` wrote.

    Raises:
        RunError: there is no model, or it is damaged.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise RunError(f"no readable model in '{folder}' ({error}); finish the run with polyfed resume") from error
    return SavedModel(weights, config)
