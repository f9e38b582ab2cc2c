"""Models ready for use: images and texts in, vectors of unit norm out, however the model is stored."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.data.cache import StoredRows
from polyfed.data.samples import Batch, Inputs, Samples
from polyfed.data.source import Column
from polyfed.data.sources.memory import image_struct
from polyfed.data.view import DataContext, View
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens
from polyfed.models.decoders import MaskHead
from polyfed.models.model import Model
from polyfed.tasks.classification import Classification
from polyfed.tasks.task import Joint, Task

Vectors = Float[np.ndarray, "n d"]
IMAGES, TEXTS = "image", "text"
_PICTURE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_REMEMBERED = 100_000  # vectors of images; beyond it only those of the present gallery are kept


class Hit(NamedTuple):
    """An entry of a gallery: its position there, and its cosine similarity to the query."""

    position: int
    similarity: float


@dataclass(frozen=True)
class ClassProbabilities:
    """Classes of some samples.

    Attributes:
        names: Names of the classes.
        probabilities: Probability of each class for each sample; they sum to 1.
    """

    names: tuple[str, ...]
    probabilities: Float[np.ndarray, "n classes"]

    @property
    def labels(self) -> list[str]:
        """The likeliest class of each sample."""
        return [self.names[number] for number in self.probabilities.argmax(1)]


@dataclass(frozen=True)
class LoadedClassifier:
    """A decision between classes.

    Attributes:
        names: of the classes; empty: they have numbers alone.
        modalities: Modalities that it reads.
        takes_some: whether some of these will do.
        scores: a batch of prepared inputs -> logits.
    """

    names: tuple[str, ...]
    modalities: tuple[str, ...]
    takes_some: bool
    scores: Callable[[Batch], Tensor]


@dataclass(frozen=True)
class LoadedEncoder:
    """Turns raw values of one modality into representations.

    Attributes:
        view: how values are presented.
        open: values as a column -> encoder inputs.
        represent: inputs -> vectors of unit norm.
        decode: inputs -> logits of the classes of every pixel, where the model segments.
    """

    view: View
    open: Callable[[Column], Inputs]
    represent: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor] | None = None

    def applied(self, function: Callable[[Tensor], Tensor], values: pa.Array, batch: int) -> np.ndarray:
        """Results of a function of raw values, batch by batch."""
        inputs = self.inputs(values)
        with torch.inference_mode():
            parts = [function(inputs(rows)).cpu() for rows in torch.split(torch.arange(len(values)), batch)]
        made: np.ndarray = torch.cat(parts).numpy()
        return made

    def inputs(self, values: pa.Array) -> Inputs:
        """Raw values as the encoder takes them."""
        column = pa.chunked_array([values])
        return self.open(Column(column, uuid.uuid4().hex, "values to encode", nested=False, folder=Path("/")))


@dataclass(frozen=True)
class LoadedModel:
    """A trained model for use; the same from a run, for its server or a client, and from an export.

    Attributes:
        name: Name for messages.
        dim: width d of its vectors.
        encoders: modality -> encoder.
        classifiers: Target -> classifier.
        remembered: Vectors of searched images, by file, date and size, or by content.
    """

    name: str
    dim: int
    encoders: Mapping[str, LoadedEncoder]
    classifiers: Mapping[str, LoadedClassifier] = field(default_factory=dict, repr=False)
    remembered: dict[object, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"LoadedModel({self.name}: {', '.join(self.encoders)} -> {self.dim})"

    def encode(self, images: Any = None, texts: Any = None, *, batch: int = 256) -> Any:
        """Vectors of unit norm [n, d]: of images, of texts, or a pair of both if both are given.

        Args:
            images: Paths, PIL images, arrays [h, w] or [h, w, 3] of uint8, or encoded bytes; one or a sequence.
            texts: strings; one or a sequence.
            batch: values at a time.

        Raises:
            ConfigError: neither is given, or the model has no encoder for them.
            DataError: a value is not an image or text.
        """
        if images is None and texts is None:
            raise ConfigError("nothing to encode; give images=..., texts=..., or both")
        pictures = None if images is None else self.encode_modality(self.modality_of(IMAGES), images, batch=batch)
        words = None if texts is None else self.encode_modality(self.modality_of(TEXTS), texts, batch=batch)
        if pictures is not None and words is not None:
            return pictures, words
        return words if pictures is None else pictures

    def encode_modality(self, modality: str, values: Any, *, batch: int = 256) -> Vectors:
        """Vectors [n, d] of a modality of any name; values other than images and texts as in the data sets.

        Raises:
            ConfigError: the model has no such encoder.
            DataError: a value cannot be presented to it.
        """
        if modality not in self.encoders:
            raise ConfigError(f"model '{self.name}' has no modality '{modality}'; {nearest(modality, self.encoders)}")
        items = _several(values)
        if not items:
            return np.zeros((0, self.dim), np.float32)
        encoder = self.encoders[modality]
        return encoder.applied(encoder.represent, self._column(modality, items), batch)

    def _column(self, modality: str, items: Sequence[Any]) -> pa.Array:
        if modality == self._place_of(TEXTS):
            return _texts(items)
        return _pictures(items) if modality == self._place_of(IMAGES) else pa.array(items)

    def classify(
        self, images: Any = None, texts: Any = None, *, target: str | None = None, batch: int = 64, **others: Any
    ) -> ClassProbabilities:
        """Names and probabilities of the classes of samples: images, texts, or other modalities of the model.

        Where values of several modalities are given, those at one place are of one sample, and None stands for what a
        sample lacks. Probabilities are a softmax: a sample has one class.

        Args:
            images: Images, see ``encode``.
            texts: likewise.
            target: Target of the classes, for a model with several; by default the first.
            batch: samples at a time.
            others: values of other modalities by name, as for ``encode_modality``.

        Raises:
            ConfigError: the model does not classify, or not by these modalities.
            DataError: a value cannot be presented to it, or a sample has none.
        """
        classifier = self._classifier(target)
        named = {IMAGES: images, TEXTS: texts}
        others |= {self.modality_of(name): values for name, values in named.items() if values is not None}
        given = {name: _several(values) for name, values in others.items()}
        some, known = "some" if classifier.takes_some else "all", set(classifier.modalities)
        if not given or not given.keys() <= known or (some == "all" and given.keys() != known):
            raise ConfigError(
                f"model '{self.name}' classifies by {some} of {', '.join(classifier.modalities)}; given are: "
                f"{', '.join(given) or 'none'}"
            )
        if len({len(items) for items in given.values()}) > 1:
            raise DataError("of each modality give as many values as there are samples, None where a sample lacks it")
        samples = self._samples(given)
        if len(samples.having_any(*given)) < len(samples):
            raise DataError("a sample is None in all modalities, so that it has nothing to be classified by")
        with torch.inference_mode():
            scores = [classifier.scores(part).float().softmax(1).cpu() for part in samples.batches(batch)]
        made = torch.cat(scores or [torch.zeros(0, len(classifier.names))]).numpy()
        names = classifier.names or tuple(map(str, range(made.shape[1])))
        return ClassProbabilities(names[: made.shape[1]], made)

    def _samples(self, given: Mapping[str, Sequence[Any]]) -> Samples:
        rows, inputs = dict[str, Tensor](), dict[str, Inputs]()
        for name, items in given.items():
            there = torch.tensor([item is not None for item in items], dtype=torch.bool)
            rows[name] = torch.where(there, there.cumsum(0) - 1, -1)
            if own := [item for item in items if item is not None]:
                inputs[name] = self.encoders[name].inputs(self._column(name, own))
        return Samples(inputs, rows, torch.arange(len(items)), targets={}, ids=(), classes={})

    def _classifier(self, target: str | None) -> LoadedClassifier:
        if not self.classifiers:
            raise ConfigError(
                f"model '{self.name}' was not trained to classify samples; it has encode, similarity, search and "
                "segment, and its similarity to texts that name classes classifies without training"
            )
        if target is not None and target not in self.classifiers:
            raise ConfigError(f"model '{self.name}' does not classify '{target}'; {nearest(target, self.classifiers)}")
        return self.classifiers[target or next(iter(self.classifiers))]

    def segment(self, images: Any, *, batch: int = 64) -> UInt8[np.ndarray, "n h w"]:
        """Masks of images: the number of the likeliest class of every pixel.

        Args:
            images: Images, see ``encode``.
            batch: Images at a time.

        Raises:
            ConfigError: the model was not trained to segment.
            DataError: a value is not an image.
        """
        encoder = self.encoders[self.modality_of(IMAGES)]
        decode = encoder.decode
        if decode is None:
            raise ConfigError(f"model '{self.name}' does not predict masks; use one trained with task 'segmentation'")
        items = _several(images)
        # without images, the mask of a black one gives the shape
        pictures = _pictures(items or [np.zeros((1, 1), np.uint8)])
        return encoder.applied(lambda x: decode(x).argmax(1).to(torch.uint8), pictures, batch)[: len(items)]

    def similarity(self, images: Any, texts: Any) -> Float[np.ndarray, "n m"]:
        """Cosine similarities of each image to each text; arrays of vectors are taken as they are."""
        scores: np.ndarray = self._vectors(IMAGES, images) @ self._vectors(TEXTS, texts).T
        return scores

    def search(self, query: Any, gallery: Any, k: int = 10) -> list[Hit]:
        """The k entries of a gallery that are most similar to a query, the best first; ties in the gallery's order.

        Images are encoded once: the next query uses their vectors.

        Args:
            query: a string is a text; anything else is an image.
            gallery: Vectors [n, d] of ``encode``; or images (strings are paths) for a text, texts for an image.
            k: how many at most.
        """
        own, other = (TEXTS, IMAGES) if isinstance(query, str) else (IMAGES, TEXTS)
        asked = self.encode_modality(self.modality_of(own), query)  # first, as a gallery takes long
        vectors = self._remembered(gallery) if other == IMAGES else self._vectors(other, gallery)
        scores = (vectors @ asked.T)[:, 0]
        order = np.argsort(-scores, kind="stable")[: max(0, k)]
        return [Hit(int(place), float(scores[place])) for place in order]

    def _remembered(self, gallery: Any) -> Vectors:
        """Vectors of images; those of earlier searches are reused."""
        if _are_vectors(gallery) or not (items := _several(gallery)):
            return self._vectors(IMAGES, gallery)
        modality, kept = self.modality_of(IMAGES), self.remembered
        pictures = [_picture(item) for item in items]
        keys = [_identity(picture) for picture in pictures]
        new = {key: picture for key, picture in zip(keys, pictures, strict=True) if key not in kept}
        if len(kept) + len(new) > _REMEMBERED:
            for key in kept.keys() - set(keys):
                del kept[key]
        kept.update(zip(new, self.encode_modality(modality, list(new.values())), strict=True))
        vectors: Vectors = np.stack([kept[key] for key in keys])
        return vectors

    def takes(self, name: str) -> bool:
        """True if it has an encoder of images (``image``) or texts (``text``)."""
        return self._place_of(name) is not None

    def modality_of(self, name: str) -> str:
        """The modality that reads images (``image``) or texts (``text``).

        Raises:
            ConfigError: there is none.
        """
        modality = self._place_of(name)
        if modality is None:
            raise ConfigError(
                f"model '{self.name}' has no encoder of {name}s; it has: {', '.join(self.encoders)} "
                "(encode_modality takes these names)"
            )
        return modality

    def _place_of(self, name: str) -> str | None:
        if name in self.encoders:
            return name
        view = Tokens if name == TEXTS else Pixels
        named = [modality for modality, encoder in self.encoders.items() if isinstance(encoder.view, view)]
        return named[0] if len(named) == 1 else None

    def _vectors(self, name: str, values: Any) -> Vectors:
        if _are_vectors(values):
            if values.shape[1] != self.dim:
                raise DataError(f"vectors of width {values.shape[1]}; this model's are {self.dim} wide")
            return values
        return self.encode_modality(self.modality_of(name), values)


def loaded_model(
    name: str,
    model: Model,
    views: Mapping[str, View],
    context: DataContext,
    task: Task | None = None,
    head: nn.Module | None = None,
    classes: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> LoadedModel:
    """A live model for use, on the device where it is.

    Args:
        name: Name for messages.
        model: A model in evaluation mode.
        views: modality -> view of its encoder.
        context: Folder of vocabularies and caches of the views.
        task: that it was trained for; None: it only encodes.
        head: Head of the task.
        classes: target -> names of its classes.
    """

    def encoder(modality: str, given: View) -> LoadedEncoder:
        view = given.resolved(modality, context)
        view.spec(modality, context)  # what was learnt is read once, and stays in this context
        heads = [head for head in model.heads.modules() if isinstance(head, MaskHead) and head.modality == modality]

        def masks(x: Tensor) -> Tensor:
            logits: Tensor = heads[0](model.positions(modality, x.to(model.device))[0])
            return logits

        return LoadedEncoder(
            view,
            lambda column: opened_apart(view, column, modality, context),
            lambda x: model.represent(modality, x.to(model.device)),
            masks if heads else None,
        )

    def classifier(task: Task, head: nn.Module | None) -> LoadedClassifier:
        only = getattr(task, "modality", None) or getattr(task, "use", None) or tuple(views)
        return LoadedClassifier(
            tuple(classes.get(task.class_targets[0], ())),
            tuple(name for name in ((only,) if isinstance(only, str) else only) if name not in task.own_modalities),
            isinstance(task, Classification),
            lambda batch: task.scores(model, head, batch.to(model.device)),
        )

    encoders = {modality: encoder(modality, view) for modality, view in views.items()}
    tasks = task.by_name if isinstance(task, Joint) else {} if task is None else {"": task}
    heads = dict(head.items()) if isinstance(head, nn.ModuleDict) else {"": head}
    deciding = {name: own for name, own in tasks.items() if own.class_targets and heads.get(name) is not None}
    classifiers = {own.class_targets[0]: classifier(own, heads[name]) for name, own in deciding.items()}
    return LoadedModel(name, model.dim, encoders, classifiers)


def opened_apart(view: View, column: Column, modality: str, context: DataContext) -> Inputs:
    """A column opened through a view, with nothing of it left in the cache that runs share."""
    with tempfile.TemporaryDirectory(prefix="polyfed-") as folder:
        inputs = view.open(column, modality, replace(context, cache=Path(folder), fitted=dict(context.fitted)))
        rows = torch.arange(len(inputs))
        if isinstance(inputs, StoredRows):  # what no run is to read again need not be as coarse as its cache
            compute = inputs.compute
            return _Computed(inputs.shape()[0], lambda rows: compute(rows.tolist()))
        if (prepare := getattr(inputs, "prepare", None)) is not None:
            prepare(rows)  # what is computed has no folder later
        else:
            inputs(rows[:1])  # some read what the folder holds at first use; maps stay readable
        return inputs


@dataclass(frozen=True)
class _Computed:
    """Inputs that are computed when they are asked for."""

    count: int
    compute: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return self.count

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.compute(rows)


def _are_vectors(values: Any) -> TypeGuard[Vectors]:
    return isinstance(values, np.ndarray) and values.dtype.kind == "f" and values.ndim == 2


def _identity(image: Mapping[str, Any]) -> object:
    """Identity of an image struct: its content, or its file's path, date and size."""
    if image.get("bytes") is not None:
        return hashlib.sha256(image["bytes"]).digest()
    try:
        stat = Path(image["path"]).stat()
    except OSError:
        return image["path"]  # unreadable; its encoder raises the error
    return image["path"], stat.st_mtime_ns, stat.st_size


def _several(values: Any) -> list[Any]:
    """The values as a list; a single one is a list of it."""
    if isinstance(values, np.ndarray):
        return list(values) if values.ndim == 4 or values.dtype.kind in "OU" else [values]
    is_one = isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__")
    return [values] if is_one else list(values)


def _texts(values: Sequence[Any]) -> pa.Array:
    odd = next((value for value in values if not isinstance(value, str)), None)
    if odd is not None:
        raise DataError(f"a text is a string, not a {type(odd).__name__}")
    return pa.array([str(value) for value in values], pa.string())


def _pictures(values: Sequence[Any]) -> pa.Array:
    return pa.array([_picture(value) for value in values], _PICTURE)


def _picture(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"bytes": value, "path": None}
    struct = value if isinstance(value, dict) else image_struct(Path(value) if isinstance(value, str) else value)
    if struct is None:
        shown = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise DataError(f"an image is a path, a PIL image, an array of uint8 or encoded bytes, not {shown}")
    return struct
