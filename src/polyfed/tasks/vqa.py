"""Visual question answering: the answer, among the most frequent ones, to a question on an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.samples import Batch, Samples
from polyfed.data.sources.questions import KIND, KIND_PRIOR, OTHER, PRIOR, VOTES
from polyfed.losses.precision import in_full_precision
from polyfed.models.heads import FusedHead, Fusion
from polyfed.models.model import CachedModel, Embedder
from polyfed.tasks import encoded_rows, evaluating
from polyfed.tasks.imputations import PresentEmbeddings, embeddings_of
from polyfed.tasks.metrics import TaskScores, items_beside, mean_by_item, sole_best
from polyfed.tasks.task import AnySamples, Task


class VQA(Task):
    """Answer questions on images by classification among the most frequent training answers (CreamFL, Table 2).

    Samples come from a source ``questions``, which makes classes of answers. A fused head on the embeddings of all
    modalities, or of those in ``use`` (``[text]`` is the question-only baseline), gives the logits. A modality that a
    sample lacks is replaced by zeros.

    Metrics in percent: ``accuracy`` (primary), ``prior`` (always the most frequent training answer), both also by kind
    of question (``accuracy_<kind>``, ``prior_<kind>``: the most frequent training answer of that kind; with
    ``n_<kind>``), and ``answerable`` (questions whose answer is among the classes). Others count as wrong and are left
    out of the loss. Further ``loss`` (cross-entropy, mean over answerable questions), ``n`` questions and ``answers``
    (classes), and ``accuracy_of_constant`` of the best one answer to all. Ties and NaN count against the model.
    Metrics by kind and priors need samples with these targets.

    With ``votes`` there are ``soft_accuracy`` (then primary) and ``soft_prior``, also by kind: means of
    ``vote_scores``, as in VQA v2.
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ("use", "fusion", "hidden", "dropout")

    target: str = Field(default="answer", description="name of the target that holds the answer's class")
    use: tuple[str, ...] | None = Field(default=None, description="modalities that the head sees; None: all")
    fusion: Fusion = Field(default="both", description="fusion of embeddings: product, concat, or both")
    hidden: int = Field(default=256, ge=1, description="width of the head's hidden layer")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share dropped before both layers of the head")
    encoders: Literal["fine_tuned", "frozen"] = Field(default="fine_tuned", description="frozen: train the head alone")
    votes: Literal["leave_one_out", "all"] | None = Field(
        default=None,
        description="score min(n / 3, 1) for an answer of n annotators, averaged over the sets without one of them "
        "(VQA v2's script), or of all; None: right or wrong",
    )

    @field_validator("use")
    @classmethod
    def _distinct(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or len(set(value)) < len(value)):
            raise ValueError(f"{list(value)} must be different modalities, at least one")
        return value

    @property
    def compared(self) -> frozenset[str]:
        return frozenset(self.use or ())

    @property
    def primary(self) -> str:
        """``accuracy``, or ``soft_accuracy`` where annotators' votes judge."""
        return "accuracy" if self.votes is None else "soft_accuracy"

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The fused classifier.

        Raises:
            ConfigError: the samples lack a modality or the target, or the target has no class names.
        """
        modalities, answers = self._modalities(samples.modalities), self._answers(samples)
        return FusedHead(dim, len(modalities), answers, fusion=self.fusion, hidden=self.hidden, dropout=self.dropout)

    def usable(self, samples: AnySamples) -> AnySamples:
        """Samples with a modality that is used."""
        return samples.having_any(*self._modalities(tuple(samples.inputs)))

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        """Cross-entropy, mean over the answerable questions of the batch; 0 if there is none."""
        batch = self.usable(batch)
        if not len(batch):
            return batch.no_loss
        return answer_loss(self.scores(model, head, batch), batch.targets[self.target].long())

    def scores(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Float[Tensor, "b answers"]:
        logits: Tensor = _require(head)(self._embeddings(model, batch))
        return logits

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """Metrics of all samples; every distinct image and question is encoded once.

        Raises:
            ConfigError: the samples lack a modality or the target.
            DataError: the samples are empty, or have another number of classes than the head's.
        """
        fused, modalities = _require(head), self._modalities(samples.modalities)
        samples = self.usable(samples)
        if len(samples) == 0:
            raise DataError("no questions to answer; enlarge this participant's share of the data")
        if (answers := self._answers(samples)) != fused.answers:
            raise DataError(
                f"target '{self.target}' has {answers} answers, but the head has {fused.answers}; evaluate with the "
                "answers that the model learnt"
            )
        labels = samples.targets[self.target].long()
        answerable = (labels >= 0) & (labels < answers)
        known = labels.where(answerable, -100)  # which a cross-entropy leaves out
        with evaluating(model, fused):
            # images have many questions: rows are encoded once and looked up
            sides = _sides(model, modalities, samples, batch_size)
            outcomes = []
            for start in range(0, len(samples), batch_size):
                rows = slice(start, start + batch_size)
                logits, truth = fused([values[index[rows]] for values, index in sides]).float(), known[rows]
                truth = truth.to(model.device)
                lost = F.cross_entropy(logits, truth, ignore_index=-100, reduction="none")
                outcomes.append((sole_best(logits), lost))
        predicted, losses = (torch.cat(part).cpu() for part in zip(*outcomes, strict=True))
        metrics = self._scores(samples, answers, "", predicted, samples.targets.get(PRIOR))
        metrics |= self._by_kind(samples, answers, predicted)
        if bool(answerable.any()):  # else the mean is undefined
            metrics["loss"] = float(losses[answerable].double().mean())
        metrics |= {"answerable": _percent(answerable), "n": float(len(labels)), "answers": float(answers)}
        given = torch.bincount(labels[answerable], minlength=answers)  # how often each answer is right
        metrics["accuracy_of_constant"] = 100.0 * int(given.max()) / len(labels)
        right = mean_by_item(100.0 * ((predicted == labels) & (predicted >= 0)), samples.items)
        return TaskScores(metrics | items_beside(samples), {"accuracy": [right]})

    def _embeddings(self, model: Embedder, batch: Batch) -> list[Float[Tensor, "b d"]]:
        modalities = self._modalities(tuple(batch.inputs))
        if self.encoders == "fine_tuned":
            return _embedded(model, batch, modalities)
        plain = model.model if isinstance(model, CachedModel) else model  # other losses need embeddings with a gradient
        if not isinstance(plain, nn.Module):
            raise ConfigError(
                f"task.encoders 'frozen' cannot be combined with a method that trains through {type(plain).__name__}; "
                "set encoders: fine_tuned"
            )
        with evaluating(plain, inference=False):  # the head trains on these embeddings
            return _embedded(plain, batch, modalities)

    def _modalities(self, available: Sequence[str]) -> tuple[str, ...]:
        return self.require_modalities(available if self.use is None else self.use, available, "use")

    def _answers(self, samples: Samples) -> int:
        if self.target not in samples.targets:
            raise ConfigError(
                f"vqa target '{self.target}' is not among the samples' targets {sorted(samples.targets)}; "
                "wrap their source in a source 'questions', or set target"
            )
        if not (names := samples.classes.get(self.target)):
            raise ConfigError(f"target '{self.target}' has no class names; wrap its source in a source 'questions'")
        if self.votes is not None and VOTES not in samples.targets:
            raise ConfigError(
                f"task.votes '{self.votes}' needs the answer of each annotator; set several: majority of the source "
                "'questions', whose answers are lists"
            )
        # rare answers share a class at the end, without an output of the head
        return len(names) - (names[-1] == OTHER)

    def _scores(
        self, samples: Samples, answers: int, ending: str, predicted: Int64[Tensor, " n"], guessed: Tensor | None
    ) -> dict[str, float]:
        """Percent of questions with right predictions, and with right guesses."""
        labels, metrics = samples.targets[self.target].long(), {}
        for name, given in ({"accuracy": predicted} | ({} if guessed is None else {"prior": guessed})).items():
            given = given.where(given < answers, -1)  # an answer outside the table is always wrong
            metrics[f"{name}{ending}"] = _percent((given == labels) & (given >= 0))
            if self.votes is not None:
                metrics[f"soft_{name}{ending}"] = _percent(vote_scores(given, samples.targets[VOTES], self.votes))
        return metrics

    def _by_kind(self, samples: Samples, answers: int, predicted: Int64[Tensor, " n"]) -> dict[str, float]:
        """Scores and number of questions of every kind that occurs."""
        metrics: dict[str, float] = {}
        guessed = samples.targets.get(KIND_PRIOR)
        for number, name in enumerate(samples.classes[KIND] if KIND in samples.targets else ()):
            chosen = (samples.targets[KIND] == number).nonzero().squeeze(1)
            if len(chosen):
                own = None if guessed is None else guessed[chosen]
                metrics |= self._scores(samples.subset(chosen), answers, f"_{name}", predicted[chosen], own)
                metrics[f"n_{name}"] = float(len(chosen))
        return metrics


def vote_scores(
    predicted: Int64[Tensor, " n"], answers: Int64[Tensor, "n annotators"], which: Literal["leave_one_out", "all"]
) -> Float[Tensor, " n"]:
    """min(k / 3, 1) for an answer that k annotators of a question gave (Antol et al. 2015; Goyal et al. 2017).

    Args:
        predicted: class of each answer; a negative one scores 0.
        answers: class that each annotator gave; negative where a question has fewer annotators.
        which: ``all`` of them, or the mean over all sets that leave one of them out.

    >>> answers = torch.tensor([[4, 4, 7, 7, 7, 7, 7, 7, 7, 7]])
    >>> [vote_scores(torch.tensor([4]), answers, which).round(decimals=3).item() for which in ("all", "leave_one_out")]
    [0.667, 0.6]
    """
    agreeing = ((answers == predicted[:, None]) & (predicted >= 0)[:, None]).sum(1).double()
    if which == "all":
        return (agreeing / 3).clamp(max=1)
    annotators = (answers >= 0).sum(1).clamp(min=1)
    others = annotators - agreeing  # leaving one of these out leaves all k
    return (agreeing * ((agreeing - 1) / 3).clamp(max=1) + others * (agreeing / 3).clamp(max=1)) / annotators


@in_full_precision
def answer_loss(logits: Float[Tensor, "b answers"], labels: Int64[Tensor, " b"]) -> Float[Tensor, ""]:
    """Cross-entropy, mean over the samples whose class the logits have; 0 (with gradient 0) if there are none.

    >>> logits, rare = torch.zeros(2, 4), -1
    >>> round(float(answer_loss(logits, torch.tensor([2, rare]))), 3)
    1.386
    """
    answerable = (labels >= 0) & (labels < logits.shape[1])
    total = F.cross_entropy(logits, labels.where(answerable, -100), ignore_index=-100, reduction="sum")
    return total / answerable.sum().clamp(min=1)


def _require(head: nn.Module | None) -> FusedHead:
    if not isinstance(head, FusedHead):
        raise TypeError("vqa needs the module that its head() made")
    return head


def _sides(
    model: Embedder, modalities: Sequence[str], samples: Samples, batch_size: int
) -> list[tuple[Float[Tensor, "rows d"], Int64[Tensor, " n"]]]:
    """Embeddings of each modality's distinct rows, zeros where it is absent, and the row of each sample."""
    encoded = {}
    for name in [name for name in modalities if bool((samples.rows[name] >= 0).any())]:
        values, inverse_index = encoded_rows(model.embed, model.device, name, samples, batch_size)
        # rows ascend: samples without the modality have the first
        lacking = int(bool((samples.rows[name] < 0).any()))
        encoded[name] = F.pad(values, (0, 0, lacking, 0)), inverse_index
    values, inverse_index = next(iter(encoded.values()))
    nothing = values.new_zeros(1, values.shape[1]), torch.zeros_like(inverse_index)
    return [encoded.get(name, nothing) for name in modalities]


def _embedded(model: Embedder, batch: Batch, modalities: Sequence[str]) -> list[Float[Tensor, "b d"]]:
    """Embeddings by modality, zero for samples that lack it."""
    parts = embeddings_of(model, batch, modalities)
    like = next(iter(parts.values())).values

    def spread(part: PresentEmbeddings | None) -> Tensor:
        if part is not None and len(part.index) == len(batch):
            return part.values
        zeros = (like if part is None else part.values).new_zeros(len(batch), like.shape[1])
        return zeros if part is None else zeros.index_add(0, part.index, part.values)

    return [spread(parts.get(name)) for name in modalities]


def _percent(scores: Bool[Tensor, " n"] | Float[Tensor, " n"]) -> float:
    return 100.0 * float(scores.double().mean())
