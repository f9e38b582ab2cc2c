"""Encoders that belong to no run, such as frozen CLIP, with the data sets that they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SerializeAsAny, model_validator

from polyfed.analysis.encoders import Encoders
from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.core.settings import Settings
from polyfed.data.view import DataContext, View
from polyfed.federation.settings import DataSettings
from polyfed.models.model import ModelSettings
from polyfed.runs.experiment import parse_settings, read_config


class GapSettings(Settings):
    """Data sets and what embeds them, without any run: frozen features as they are, or any encoders."""

    name: str = Field(default="encoders", description="shown in results")
    data: DataSettings
    features: dict[str, SerializeAsAny[View]] = Field(
        default_factory=dict,
        description="modality -> view that gives one vector a sample, such as frozen CLIP features",
    )
    model: ModelSettings | None = Field(
        default=None, description="encoders; what is not pretrained in them is drawn at random"
    )
    seed: int = Field(default=0, ge=0, description="of what is drawn at random")
    device: str = Field(default="auto", description="auto, cpu, cuda, ...")
    batch: int = Field(default=256, ge=1, description="samples at a time")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if bool(self.features) == (self.model is not None):
            raise ValueError("needs either 'features' or 'model', and not both")
        return self

    def encoders(self) -> Encoders:
        """What embeds the data sets.

        Raises:
            ConfigError: a view gives no vectors, a backbone cannot be had, or the device is not usable.
        """
        folders = self.data.cache_folder, self.data.weights_folder
        context, device = DataContext(*folders, pixels=self.data.max_pixels), resolve_device(self.device)
        if self.model is None:
            for modality, view in self.features.items():
                _require_vectors(modality, view, context)
            return Encoders(self.name, self.data, self.features, context, lambda _, x: x, device, self.batch)
        views = {modality: encoder.view for modality, encoder in self.model.encoders.items()}
        with isolated(self.seed, "gap"):
            model = self.model.build({}, context).to(device).eval()
        return Encoders(self.name, self.data, views, context, model.embed, device, self.batch)


def load_encoders(
    path: Path, *, data_dir: Path | None = None, weights_dir: Path | None = None, device: str | None = None
) -> Encoders:
    """Encoders from a YAML file with ``GapSettings``; folders and device that are given come before the file's.

    Raises:
        ConfigError: it cannot be read, or is wrong; the message names the key.
    """
    settings = parse_settings(GapSettings, read_config(path))
    folders = {"dir": data_dir, "weights_dir": weights_dir}
    data = settings.data.model_copy(update={key: path for key, path in folders.items() if path is not None})
    return settings.model_copy(update={"data": data, "device": device or settings.device}).encoders()


def _require_vectors(modality: str, view: View, context: DataContext) -> None:
    spec = view.spec(modality, context)
    if len(spec.shape) != 1 or spec.vocabulary:
        raise ConfigError(
            f"features.{modality}: view '{view.component_name()}' gives {list(spec.shape)} a sample, not a vector; "
            "use view features with pool cls, mean or pooled, or give encoders under 'model'"
        )
