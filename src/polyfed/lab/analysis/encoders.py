"""What analyses look at: encoders of a run or of a file, with the data that they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field, SerializeAsAny, model_validator
from torch import Tensor

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.randomness import generator, isolated
from polyfed.core.settings import Settings, parse_settings
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.data.view import DataContext, View
from polyfed.federation.settings import DataSettings
from polyfed.models.model import ModelSettings
from polyfed.runs.config_files import read_config
from polyfed.runs.opened import ServerModel


@dataclass(frozen=True)
class Encoders:
    """Encoders by modality, and the data sets that they may be shown.

    Attributes:
        name: what they are, for titles and records.
        data: the sources.
        views: modality -> view of its encoder.
        context: where the views find what they learnt.
        embed: (modality, encoder input on the device) -> embeddings [b, d].
        device: of the encoders.
        batch: samples at a time.
    """

    name: str
    data: DataSettings
    views: Mapping[str, View]
    context: DataContext
    embed: Callable[[str, Tensor], Tensor]
    device: torch.device
    batch: int = 256

    def split(self, source: str, name: str) -> Split:
        """A split of a source.

        Raises:
            ConfigError: there is no such source.
            DataError: the source has no such split.
        """
        if source not in self.data.sources:
            raise ConfigError(f"no source '{source}' in data.sources; {nearest(source, self.data.sources)}")
        return self.data.sources[source].open(name, name=source, data_dir=self.data.data_folder)

    def modalities(self, split: Split) -> tuple[str, ...]:
        return tuple(name for name in self.views if name in split.columns)

    def samples(self, split: Split, modality: str) -> Samples:
        return assemble(split, {modality: self.views[modality]}, self.context)

    @torch.no_grad()
    def embeddings(
        self, samples: Samples, modality: str, rows: Int64[Tensor, " n"] | None = None
    ) -> Iterator[Float[Tensor, "b d"]]:
        load = samples.inputs[modality]
        rows = torch.arange(len(load)) if rows is None else rows
        for part in torch.split(rows, self.batch):
            yield self.embed(modality, load(part).to(self.device)).float().cpu()


def encoders_of(server: ServerModel, *, normalise: bool) -> Encoders:
    """A server model's encoders; with ``normalise`` they give representations (unit norm), else embeddings."""
    run, model = server.run, server.model
    return Encoders(
        name=f"{run.name}, server model of round {server.round}",
        data=run.conditions.data,
        views=server.views,
        context=server.context,
        embed=model.represent if normalise else model.embed,
        device=model.device,
        batch=run.conditions.run.evaluation_batch,
    )


class EncoderFile(Settings):
    """Encoders that belong to no run, such as frozen CLIP, and the data sets that they are shown."""

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


def load_encoders(
    path: Path, *, data_dir: Path | None = None, weights_dir: Path | None = None, device: str | None = None
) -> Encoders:
    """Encoders from a YAML file with ``EncoderFile``; folders and device that are given come before the file's.

    Raises:
        ConfigError: it cannot be read, or is wrong (the message names the key); a view gives no vectors, a backbone
            cannot be had, or the device is not usable.
    """
    settings = parse_settings(EncoderFile, read_config(path))
    folders = {"dir": data_dir, "weights_dir": weights_dir}
    data = settings.data.model_copy(update={key: path for key, path in folders.items() if path is not None})
    context = DataContext(data.cache_folder, data.weights_folder, pixels=data.max_pixels, seed=settings.seed)
    place = resolve_device(device or settings.device)
    if settings.model is None:
        for modality, view in settings.features.items():
            spec = view.spec(modality, context)
            if len(spec.shape) != 1 or spec.vocabulary:
                raise ConfigError(
                    f"features.{modality}: view '{view.component_name()}' gives {list(spec.shape)} a sample, not a "
                    "vector; use view features with pool cls, mean or pooled, or give encoders under 'model'"
                )
        # frozen features are embeddings already
        return Encoders(settings.name, data, settings.features, context, lambda _, x: x, place, settings.batch)
    views = {modality: encoder.view for modality, encoder in settings.model.encoders.items()}
    with isolated(settings.seed, "gap"):  # what is not pretrained depends on the seed alone
        model = settings.model.build({}, context).to(place).eval()
    return Encoders(settings.name, data, views, context, model.embed, place, settings.batch)


def drawn(count: int, most: int | None, *purpose: int | str) -> Int64[Tensor, " k"]:
    """At most ``most`` of ``count`` positions, ascending, drawn at random by ``purpose`` alone."""
    if most is None or most >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(*purpose))[:most].sort().values


def require_different(names: Sequence[str], option: str) -> None:
    """Raise ConfigError if a name comes twice."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{option}: '{twice[0]}' is named {names.count(twice[0])} times; name it once")
