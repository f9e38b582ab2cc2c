"""Zero-shot classification: the class whose prompts are nearest, without any training."""

from __future__ import annotations

import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, nearest
from polyfed.data.source import text_column
from polyfed.lab.downstream.bench import Bench, FrozenModel
from polyfed.lab.downstream.probe import Probe, absent_note, class_metrics
from polyfed.lab.downstream.results import Outcome, ProbeRow


class ZeroShot(Probe):
    """Classify by the cosine with prompts of each class (CLIP, Radford et al., ICML 2021, section 3.1).

    A class is represented by the mean of the unit vectors of its prompts (every template with every word), scaled to
    unit norm. Metrics as of ``few_shot``; a class's score in AUROC is its cosine less the mean of the others'.
    """

    source: str = Field(description="name of a source")
    target: str = Field(default="label", description="name of the target that holds the class")
    split: str = Field(default="test", description="split that metrics are of")
    modality: str = Field(default="image", description="modality that is classified")
    prompts: str = Field(default="text", description="modality of the prompts")
    templates: tuple[str, ...] = Field(default=("{}",), min_length=1, description="texts in which {} is the word")
    classes: dict[str, tuple[str, ...]] = Field(min_length=2, description="class name of the source -> its words")

    @field_validator("templates")
    @classmethod
    def _have_a_place(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for template in value:
            if "{}" not in template:
                raise ValueError(f"template '{template}' has no {{}} for the class's word")
        return value

    @field_validator("classes")
    @classmethod
    def _have_words(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, words in value.items():
            if not words or not all(word.strip() for word in words):
                raise ValueError(f"class '{name}' needs words, none of them empty, not {list(words)}")
        return value

    def unsuitable(self, bench: Bench) -> str | None:
        """The model does not encode both modalities."""
        return bench.subject.lacks([self.modality, self.prompts])

    def check(self, bench: Bench, task: str) -> None:
        bench.require(task, self.source, [self.split], [self.modality], self.target)
        names = self._names(bench)
        if not names:
            raise ConfigError(f"tasks.{task}: target '{self.target}' of '{self.source}' has no class names")
        for odd in set(names) ^ set(self.classes):
            where = "the source has no such class" if odd in self.classes else "a class of the source without words"
            raise ConfigError(f"tasks.{task}.classes: '{odd}': {where}; {nearest(odd, names)}")

    def run(self, bench: Bench, task: str) -> Outcome:
        names = self._names(bench)
        weights = torch.stack([self.class_vector(bench.subject, name) for name in names])
        x = F.normalize(bench.features(self.source, self.split, self.modality, "embedding"), dim=-1)
        labels = bench.labels(self.source, self.split, self.modality, self.target)
        cosines = x @ weights.T
        # a picture may be near all prompts; what tells classes apart is by how much more to one
        others = (cosines.sum(1, keepdim=True) - cosines) / (len(names) - 1)
        values = {name: [value] for name, value in class_metrics(cosines - others, labels).items()}
        prompts = sum(len(self.texts(name)) for name in names)
        row = ProbeRow(self.split, values, {"n_test": len(labels), "prompts": prompts})
        return Outcome(f"{self.source}.{self.target}", [row], absent_note(labels, names))

    def texts(self, name: str) -> list[str]:
        return [template.replace("{}", word) for template in self.templates for word in self.classes[name]]

    def _names(self, bench: Bench) -> tuple[str, ...]:
        return tuple(bench.split(self.source, self.split).classes.get(self.target, ()))

    @torch.no_grad()
    def class_vector(self, subject: FrozenModel, name: str) -> Float[Tensor, " d"]:
        texts = self.texts(name)
        column = text_column(texts, f"prompts of '{name}'")
        rows = subject.views[self.prompts].open(column, self.prompts, subject.context)
        units = subject.model.represent(self.prompts, rows(torch.arange(len(texts))).to(subject.device)).cpu()
        return F.normalize(units.mean(0), dim=-1)
