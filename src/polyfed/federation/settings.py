"""Settings of a federation: participants, their data, models and tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from jaxtyping import Int64
from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator
from torch import Tensor

from polyfed.core.device import Threads
from polyfed.core.files import folder_of_file, named_in, user_cache
from polyfed.core.settings import Place, PlaceBeside, Settings
from polyfed.data.images import MOST_PIXELS, PIXELS
from polyfed.data.source import Source
from polyfed.models.model import ModelSettings
from polyfed.optim.settings import OptimizerSettings, Schedule
from polyfed.partitions.partition import Iid, Partition
from polyfed.tasks.task import Task

Lacking = Mapping[str, Int64[Tensor, " k"]]
"""Modality -> items that lack it."""

Rate = Annotated[float, Field(gt=0, le=1)]


class MissingSettings(Settings):
    """Take a modality from some of the items of a group's clients; no item loses all that it has."""

    rates: dict[str, Rate] = Field(min_length=1, description="modality -> share of items that lack it")
    test: bool = Field(default=False, description="whether the clients' test items lack modalities likewise")

    def require_fit(self, encoded: Sequence[Collection[str]], test_split: str | None) -> None:
        """Check that the rates suit a group.

        Args:
            encoded: modalities that each of its models encodes of samples.
            test_split: split of their test items.

        Raises:
            ValueError: a modality is not encoded by all, or an item would lose all that it has.
        """
        total = sum(self.rates.values())
        for modalities in encoded:
            unknown = [name for name in self.rates if name not in modalities]
            if unknown:
                raise ValueError(f"missing.rates names '{unknown[0]}', which not all models of the group encode")
            if total > len(modalities) - 1:
                raise ValueError(
                    f"missing.rates {self.rates} are together more than {len(modalities) - 1}, so that items would "
                    f"lack all of the {len(modalities)} modalities that a model encodes; lower them"
                )
        if self.test and test_split is None:
            raise ValueError("missing.test: the group has no test_split; leave it out")

    def lacking(self, items: Int64[Tensor, " n"], stream: torch.Generator) -> Lacking:
        """Items that lack each modality, as near to the rates as possible.

        Items stand around a circle in random order, and modalities are missing on arcs of it, one after the other: as
        few items as can be lack two, and none lacks all.

        Args:
            items: items of a client, ascending.
            stream: the only source of randomness.
        """
        order = torch.randperm(len(items), generator=stream)
        ends = [round(len(items) * share) for share in accumulate(self.rates.values(), initial=0.0)]
        lacking = {}
        for name, start, end in zip(self.rates, ends, ends[1:], strict=False):
            mask = torch.zeros(len(items), dtype=torch.bool)
            mask[order[torch.arange(start, end) % len(items)]] = True
            lacking[name] = items[mask]
        return lacking


class DataSettings(Settings):
    """Where data, weights and caches are, and the data sets by name."""

    dir: PlaceBeside | None = Field(default=None, description="folder of data sets; --data-dir, or POLYFED_DATA")
    weights_dir: PlaceBeside | None = Field(default=None, description="folder of weights; else POLYFED_WEIGHTS")
    cache_dir: PlaceBeside | None = Field(default=None, description="decoded images and features; or POLYFED_CACHE")
    max_pixels: int = Field(default=PIXELS, ge=1, le=MOST_PIXELS, description="most pixels of a decoded image")
    device_memory: int = Field(default=1 << 30, ge=0, description="bytes of data that stay on a GPU at most")
    sources: dict[str, SerializeAsAny[Source]] = Field(description="name -> source")

    @model_validator(mode="after")
    def _beside_the_file(self) -> Self:
        if (folder := folder_of_file()) is not None:
            for name, source in self.sources.items():
                self.sources[name] = source.beside(folder, name, self.data_folder)
        return self

    @property
    def data_folder(self) -> Path | None:
        return self.dir or named_in("POLYFED_DATA")

    @property
    def weights_folder(self) -> Path | None:
        return self.weights_dir or named_in("POLYFED_WEIGHTS")

    @property
    def cache_folder(self) -> Path:
        """Folder of caches: the setting, else POLYFED_CACHE, else ``~/.cache/polyfed``."""
        return self.cache_dir or user_cache()


class PublicSettings(Settings):
    """The public set P: paired samples that every participant may see, in a fixed order."""

    source: str = Field(description="name of a source")
    split: str = Field(default="train", description="split that the items are drawn from")
    items: int | None = Field(default=None, ge=2, description="number of items (images); None takes all")
    per_item: int | None = Field(default=None, ge=1, description="samples (captions) per item; None takes all")
    without: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="modality -> words, or ``@source`` for the class names of a source: items whose text has one of "
        "them, singular or plural, are not public",
    )
    unpaired: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="modality -> number of further items of which this modality alone is public: images without "
        "captions, captions without images",
    )
    gallery: int = Field(
        default=0,
        ge=0,
        description="number of further items that all represent and none learns from; on them the clients' ensemble is "
        "compared with the server",
    )
    reserve: int = Field(
        default=0,
        ge=0,
        description="number of further items that no participant holds, so that clients hold the same as where so many "
        "items are public",
    )

    @property
    def further(self) -> int:
        """Number of items other than the pairs."""
        return sum(self.unpaired.values()) + self.gallery


class TrainingSettings(Settings):
    """How a participant's model is optimised."""

    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    schedule: Schedule = Field(default_factory=Schedule)
    batch_size: int = Field(default=64, ge=2, description="samples per training batch; a last batch of one is left out")


def require_no_batch_size(training: TrainingSettings, why: str) -> None:
    """Check that an optimiser that has no batches of its own is given no batch size.

    Raises:
        ValueError: it is given one; ``why`` it has no effect.
    """
    if training.batch_size != TrainingSettings.model_fields["batch_size"].default:
        raise ValueError(f"training.batch_size {training.batch_size} has no effect: {why}; leave it out")


TypeName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9_-]{0,64}$",
        description="keeps models apart that are otherwise of one type (equal model, task and classes, whatever the "
        "source): only those with the same name here are averaged whole",
    ),
]


def _several(value: Any) -> Any:
    return {"name": "joint", "tasks": value} if isinstance(value, list | tuple) else value


TaskSettings = Annotated[SerializeAsAny[Task], BeforeValidator(_several)]
"""A task, or a list of several."""


class ServerSettings(Settings):
    """The server's model, its task, and the data that it is judged on."""

    model: ModelSettings
    task: TaskSettings
    source: str = Field(description="source of the server's validation and test samples")
    validation_split: str | None = Field(default="validation", description="split for model selection; None: none")
    test_split: str = "test"
    type: TypeName = ""
    expected_test_items: int | None = Field(
        default=None,
        ge=1,
        description="items (images) that the test split must have, where recalls are named after their gallery; "
        "another number is refused before the run",
    )
    training: TrainingSettings = Field(default_factory=TrainingSettings)


class AlsoSettings(Settings):
    """Additional items of a group's clients: those of the public set, or of a second source, dealt out among them."""

    public: bool = Field(default=False, description="deal out the public set; ``also: public`` is short for it")
    source: str | None = Field(default=None, description="source that is dealt out in addition")
    split: str = Field(default="train", description="split of that source")
    items: int | None = Field(default=None, ge=1, description="deal out only so many items; None: all that there are")
    partition: SerializeAsAny[Partition] = Field(default_factory=Iid)

    @model_validator(mode="after")
    def _one_origin(self) -> AlsoSettings:
        if self.public == (self.source is not None):
            raise ValueError("give either 'public' (also: public) or a source ({source: NAME}), and not both")
        if self.public and self.split != "train":
            raise ValueError("split has no effect with the public set, which has its own; remove it")
        return self


class GroupSettings(Settings):
    """Clients with one data source and task, architectures of their own if several models are given."""

    short_form: ClassVar[str] = "model"

    count: int = Field(ge=1, description="number of clients")
    source: str = Field(description="source that is dealt out among the clients")
    split: str = "train"
    test_split: str | None = Field(default="test", description="split of the clients' own test; None: no test")
    test: Literal["all", "dealt"] = Field(
        default="all",
        description="test on the whole test split, or on what a client gets when it is dealt out as the clients hold "
        "the classes",
    )
    test_items: int | None = Field(default=None, ge=1, description="most test items per client, drawn for the group")
    items: Annotated[int, Field(ge=1)] | Literal["public"] | None = Field(
        default=None,
        description="deal out only so many items; None: all that are not public; ``public``: those of the public set, "
        "which is of the same split, in place of private ones",
    )
    partition: SerializeAsAny[Partition] = Field(default_factory=Iid)
    also: AlsoSettings | None = Field(default=None, description="additional items: ``public``, or a source")
    missing: MissingSettings | None = Field(default=None, description="take modalities from items; null: none")
    task: TaskSettings
    type: TypeName = ""
    models: list[ModelSettings] = Field(min_length=1, description="client k gets models[k % len(models)]")
    training: TrainingSettings = Field(default_factory=TrainingSettings)

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, data: Any) -> Any:
        if isinstance(data, dict) and cls.short_form in data and "models" not in data:
            others = {key: value for key, value in data.items() if key != cls.short_form}
            return {**others, "models": [data[cls.short_form]]}
        return data

    @field_validator("also", mode="before")
    @classmethod
    def _short_for_public(cls, value: Any) -> Any:
        if value == "public":
            return {"public": True}
        if isinstance(value, str):
            raise ValueError(f"'{value}' is not 'public'; to deal out a source, write {{source: {value}}}")
        return value

    @model_validator(mode="after")
    def _gaps_fit(self) -> GroupSettings:
        if self.missing is not None:
            encoded = [model.encoders.keys() - self.task.own_modalities for model in self.models]
            self.missing.require_fit(encoded, self.test_split)
        return self

    @model_validator(mode="after")
    def _other_data(self) -> GroupSettings:
        if self.also is not None and (self.also.source, self.also.split) == (self.source, self.split):
            what = f"also: '{self.source}' {self.split} is dealt out among these clients anyway"
            raise ValueError(f"{what}; name another source or split, or 'public'")
        return self

    @model_validator(mode="after")
    def _split_to_test_on(self) -> GroupSettings:
        if self.test != "all" and self.test_split is None:
            raise ValueError(f"test: {self.test} needs a test_split")
        return self

    def is_of(self, public: PublicSettings) -> bool:
        """Whether its items are of the split of a public set."""
        return (self.source, self.split) == (public.source, public.split)

    def additional(self, public: PublicSettings | None) -> GroupSettings:
        """The group as if what it holds in addition (``also``) were all that it holds."""
        assert self.also is not None
        source, split = self.also.source, self.also.split
        if self.also.public:
            assert public is not None
            source, split = public.source, public.split
        also = {"items": self.also.items, "partition": self.also.partition}
        return self.model_copy(update={"source": source, "split": split, **also})


GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""Names of clients begin with it, and files are called after them."""


class HostSettings(Settings):
    """How client steps are carried out at one place."""

    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps, ...")
    threads: Threads = Field(
        default=None,
        validate_default=True,
        description="CPU threads; null: of the cores that this process may use, two at most. Sums depend on it",
    )
    evaluation_batch: int = Field(default=256, ge=1, description="samples per batch when no gradient is needed")
    state_memory: int = Field(default=1 << 30, ge=0, description="bytes of client state held in memory at most")


class SiteSettings(Settings):
    """A place that hosts clients: a process of a simulation, or an institution."""

    data: DataSettings
    public: PublicSettings | None = None
    clients: dict[GroupName, GroupSettings] = Field(description="group name -> clients of a kind that live here")
    run: HostSettings = Field(default_factory=HostSettings)
    secret: Place | None = Field(default=None, description="file of the secret that noise is drawn from; None: made")
