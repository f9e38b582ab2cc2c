"""A page of queries with the retrievals of server and clients before and after the federation, and test samples with
their predictions; both show local data."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from PIL import Image, ImageOps
from torch import Tensor

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import write_atomically
from polyfed.data.arrow import list_lengths
from polyfed.data.images import image_bytes, opened_image
from polyfed.data.samples import Inputs
from polyfed.data.sounds import wav, waveform
from polyfed.data.source import Column, Split
from polyfed.data.view import DataContext, View
from polyfed.data.views.mel import Mel
from polyfed.federation.client import SERVER
from polyfed.federation.settings import ServerSettings
from polyfed.models.model import ModelSettings
from polyfed.reporting.markup import GalleryEntry
from polyfed.reporting.page import rendered_page
from polyfed.reporting.tables import Cell, TextTable
from polyfed.runs.loaded import LoadedModel, Vectors, loaded_model
from polyfed.runs.opened import Run
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.tasks.metrics import dice, overlaps
from polyfed.tasks.segmentation import Segmentation

_SIDE = 112  # pixels of a thumbnail
_RATE = 8000  # samples per second of playable sound
_SECONDS = 5  # longest playable sound
_BATCH = 256  # values encoded at a time
_ITSELF = -2.0  # similarity of a value to itself, below all others


@dataclass(frozen=True)
class Shelf:
    """Values of one modality to retrieve from.

    Attributes:
        modality: Modality of the values.
        values: Texts, encoded images, recordings, or rows of a table.
        items: Item of each value.
        open: Returns the values through a view; decoded and computed values come from the cache.
    """

    modality: str
    values: Sequence[Any]
    items: Int64[np.ndarray, " n"]
    open: Callable[[View], Inputs]

    def encoded(self, model: LoadedModel) -> Vectors:
        """Vectors [n, d] of the values."""
        encoder, batches = model.encoders[self.modality], torch.split(torch.arange(len(self.values)), _BATCH)
        inputs = self.open(encoder.view)
        with torch.inference_mode():
            return np.asarray(torch.cat([encoder.represent(inputs(rows)).cpu() for rows in batches]))

    def entry(
        self, index: int, similarity: float = 1.0, right: bool = False, *, playable: bool = False
    ) -> GalleryEntry:
        """One value for the page; a recording as its envelope, with sound if it is ``playable``."""
        return gallery_entry(self.values[index], playable=playable)._replace(similarity=similarity, right=right)


@dataclass(frozen=True)
class Viewer:
    """A participant with its model before and after the federation."""

    name: str
    before: LoadedModel
    after: LoadedModel

    @classmethod
    def of(cls, run: Run, name: str) -> Viewer:
        """Viewer of a run; initial weights depend on seed and participant alone, so that no run keeps them."""
        federation = run.federation
        settings: ModelSettings
        if name == SERVER:
            assert run.experiment.server is not None
            model, settings = federation.server_model(), run.experiment.server.model
        else:
            member = federation.members[name]
            model, settings = federation.client_model(member), member.model
        views = {modality: encoder.view for modality, encoder in settings.encoders.items()}
        before = loaded_model(f"{name} before", model.to(run.place).eval(), views, federation.data.context)
        return cls(name, before, run.model_of(name))

    @cached_property
    def directions(self) -> tuple[tuple[str, str], ...]:
        """Modalities of query and gallery: all pairs of several modalities, else within the one."""
        own = tuple(reversed(tuple(self.after.encoders)))
        return tuple(itertools.permutations(own, 2)) if len(own) > 1 else ((own[0], own[0]),)


def write_gallery(
    run: Run, out: Path | None = None, *, queries: int = 6, k: int = 5, most: int = 500, per_group: int = 1
) -> Path:
    """Write the page, which contains values of the test data: it must stay where these data may be.

    Before is the model with its initial weights; after is the run's server model, and the last models of clients.

    Args:
        run: The run, with its data available.
        out: The file, by default ``gallery.html`` in the run folder.
        queries: Queries of each modality, spread over the test data.
        k: Entries shown for each query.
        most: Largest number of test items; the first ones are used.
        per_group: Clients of each group.

    Raises:
        RunError: The run has neither test data nor models.
        ConfigError, DataError: Models or data of the run cannot be opened.
    """
    split = _test_split(run)
    viewers, left_out = _viewers(run, per_group)
    shelves = _shelves(split, viewers, most, run.federation.data.context)
    shown = [Retrieval(viewer, shelves, k) for viewer in viewers]
    content: dict[str, Any] = {
        "run": run.name,
        "model": str(run.records.chosen) if run.experiment.server is not None else "",
        "source": f"{split.source}, {split.name}",
        "size": ", ".join(f"{len(shelf.values):,} {modality}s" for modality, shelf in shelves.items()),
        "k": k,
        "queries": [query for modality in shelves for query in _queries(shown, shelves, modality, queries)],
        "table": TextTable.of(
            f"Queries whose right answer is among the first {k}, in percent",
            [row for each in shown for row in each.summary()],
        ),
        "left_out": left_out,
    }
    path = run.folder / "gallery.html" if out is None else out
    write_atomically(path, rendered_page("gallery.html.j2", title=f"{run.name}: gallery", **content).encode())
    return path


class Retrieval:
    """Retrievals of a participant for every value of a shelf, before and after.

    Args:
        viewer: The participant.
        shelves: Shelves by modality.
        k: Entries shown for each query.
    """

    def __init__(self, viewer: Viewer, shelves: Mapping[str, Shelf], k: int) -> None:
        self.viewer, self.shelves, self.k = viewer, shelves, k
        self._scores = {
            (when, *direction): self._compared(model, *direction)
            for when, model in (("before", viewer.before), ("after", viewer.after))
            for direction in viewer.directions
            if set(direction) <= shelves.keys()
        }

    def retrieved(self, when: str, asked: str, given: str, index: int) -> list[GalleryEntry]:
        """The first k entries of a modality for a value of another, and the first right one."""
        scores, shelf = self._scores[when, asked, given][index], self.shelves[given]
        order = np.argsort(-scores, kind="stable")
        right = (shelf.items[order] == self.shelves[asked].items[index]) & (scores[order] > _ITSELF)
        late = [int(np.argmax(right))] if right.any() and not right[: self.k].any() else []
        return [
            shelf.entry(int(order[rank]), float(scores[order[rank]]), bool(right[rank]))._replace(
                late=rank + 1 if rank in late else 0
            )
            for rank in [*range(min(self.k, len(order))), *late]
        ]

    def rows(self, asked: str, index: int) -> Iterator[dict[str, object]]:
        """Retrievals for a value, one row per modality."""
        modalities = [given for when, modality, given in self._scores if (when, modality) == ("after", asked)]
        for given in modalities:
            name = self.viewer.name if len(modalities) == 1 else f"{self.viewer.name}: {given}"
            yield {"name": name} | {when: self.retrieved(when, asked, given, index) for when in ("before", "after")}

    def summary(self) -> Iterator[dict[str, Cell]]:
        # within a modality only some queries have a right answer: the other captions of an image
        for asked, given in dict.fromkeys(key[1:] for key in self._scores if key[1] != key[2]):
            shares = {when: 100 * float(self._hits(when, asked, given).mean()) for when in ("before", "after")}
            yield {"participant": self.viewer.name, "direction": f"{asked} to {given}", **shares}

    def _hits(self, when: str, asked: str, given: str) -> Bool[np.ndarray, " n"]:
        first = np.argsort(-self._scores[when, asked, given], axis=1, kind="stable")[:, : self.k]
        hits: Bool[np.ndarray, " n"] = (self.shelves[given].items[first] == self.shelves[asked].items[:, None]).any(1)
        return hits

    def _compared(self, model: LoadedModel, asked: str, given: str) -> Float[np.ndarray, "n m"]:
        vectors = {modality: self.shelves[modality].encoded(model) for modality in {asked, given}}
        scores: Float[np.ndarray, "n m"] = vectors[asked] @ vectors[given].T
        if asked == given:
            np.fill_diagonal(scores, _ITSELF)  # the query itself is not an answer
        return scores


def thumbnail(data: bytes) -> str:
    """A small JPEG of an encoded image as a data URI."""
    with opened_image(data) as image:
        image.draft("RGB", (2 * _SIDE, 2 * _SIDE))
        small = ImageOps.exif_transpose(image).convert("RGB")
        small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=82)
    return _uri("image/jpeg", stream.getvalue())


def gallery_entry(value: Any, *, playable: bool = False) -> GalleryEntry:
    """Entry of a text, a recording (WAV, or decoded), an image, or a row of a table."""
    if isinstance(value, str):
        return GalleryEntry("", value)
    if isinstance(value, bytes) and (value[:4], value[8:12]) != (b"RIFF", b"WAVE"):
        return GalleryEntry(thumbnail(value), "")
    if isinstance(value, bytes) or (isinstance(value, dict) and "sampling_rate" in value):
        samples = waveform(value, _RATE, most=_SECONDS)
        return GalleryEntry(envelope(samples), "", sound=_uri("audio/wav", wav(samples, _RATE)) if playable else "")
    return GalleryEntry("", _row(value))


def judged_samples(run: Run, most: int = 6) -> list[list[GalleryEntry]]:
    """Some of the server's test samples with truth and prediction, if they are images with masks, or recordings.

    Args:
        run: The run, with its data available.
        most: Number of samples, spread over the test data.

    Returns:
        A row of entries per sample; empty where the server has another task.

    Raises:
        RunError: No model is kept.
        ConfigError, DataError: Models or data of the run cannot be opened.
    """
    server = run.experiment.server
    task, modality = _judged(server) if server is not None else (None, "")
    if server is None or task is None:
        return []
    saved = run.server_model()
    samples = task.usable(run.federation.server_samples(server.test_split))
    index = torch.linspace(0, len(samples) - 1, min(most, len(samples))).round().long()
    batch, rows = samples.batch(index).to(saved.model.device), samples.rows[modality][index].numpy()
    with evaluating(saved.model, saved.head):
        predicted = task.scores(saved.model, saved.head, batch).argmax(1).cpu()
    true = batch.targets[task.target].cpu().long()
    column = run.federation.data.split(server.source, server.test_split).modality(modality)
    column = column.without_gaps()[0] if column.gaps else column
    pixels = run.federation.data.context.pixels
    values = zip(rows.tolist(), column.take(rows).to_pylist(), strict=True)
    shown = [
        gallery_entry(_readable(column, *each, pixels), playable=True)._replace(similarity=None) for each in values
    ]
    if isinstance(task, Segmentation):
        masks = zip(shown, true, predicted.view_as(true), strict=True)
        return [[entry, *_masks(entry, mask, one, len(task.names))] for entry, mask, one in masks]
    names = samples.classes.get(task.target) or range(1 + int(max(true.max(), predicted.max())))
    answers = zip(shown, true.tolist(), predicted.tolist(), strict=True)
    return [[entry._replace(text=f"{names[a]}, predicted {names[b]}", right=a == b)] for entry, a, b in answers]


def _judged(server: ServerSettings) -> tuple[Segmentation | Classification | None, str]:
    """The task and its modality, if it is segmentation or classification of recordings; else None."""
    task = server.task
    if isinstance(task, Segmentation):
        return task, task.modality
    sounds = [name for name, encoder in server.model.encoders.items() if isinstance(encoder.view, Mel)]
    return (task, sounds[0]) if sounds and isinstance(task, Classification) else (None, "")


def _masks(
    entry: GalleryEntry, true: Int64[Tensor, "h w"], predicted: Int64[Tensor, "h w"], classes: int
) -> Iterator[GalleryEntry]:
    """Images of both masks, of the size of the entry's image."""
    size = Image.open(io.BytesIO(base64.b64decode(entry.image.partition(",")[2]))).size
    own = dice(overlaps(predicted[None], true[None], classes)[0])[1:].nanmean().nan_to_num(1.0)
    colours = [round(255 * part) for k in range(256) for part in hsv_to_rgb(0.618 * k % 1, 0.75, k > 0)]
    for mask, words in ((true, "truth"), (predicted, f"predicted, Dice {100 * float(own):.0f} %")):
        drawn = Image.fromarray(mask.numpy().astype(np.uint8))
        drawn.putpalette(colours)
        yield GalleryEntry(_png(drawn.convert("RGB").resize(size, Image.Resampling.NEAREST)), words, None)


def _row(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    cells = {name: f"{len(cell)} values" if isinstance(cell, list) else cell for name, cell in value.items()}
    return ", ".join(
        f"{name} {cell:.3g}" if isinstance(cell, float) else f"{name} {'-' if cell is None else cell}"
        for name, cell in cells.items()
    )


def envelope(samples: Float[np.ndarray, " n"]) -> str:
    """A small image of a recording's loudness over time as a data URI."""
    heights = np.array([part.max() if part.size else 0.0 for part in np.array_split(np.abs(samples), _SIDE)])
    rows = np.abs(np.linspace(-1, 1, _SIDE // 2))[:, None]
    pixels = np.where(rows <= heights / max(float(heights.max()), 1e-6), 60, 255).astype(np.uint8)
    return _png(Image.fromarray(pixels))


def _png(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return _uri("image/png", stream.getvalue())


def _uri(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _test_split(run: Run) -> Split:
    """Test data of the server, else of the group with most modalities."""
    federation, experiment = run.federation, run.experiment
    if experiment.server is not None:
        return federation.data.split(experiment.server.source, experiment.server.test_split)
    if not (groups := [group for group in experiment.clients.values() if group.test_split is not None]):
        raise RunError(f"no participant of '{run.folder}' has test data to retrieve; set test_split of a group")
    chosen = max(groups, key=lambda group: len(group.models[0].encoders))
    return federation.data.split(chosen.source, str(chosen.test_split))


def _shelves(split: Split, viewers: Sequence[Viewer], most: int, context: DataContext) -> dict[str, Shelf]:
    """Modality that a viewer encodes -> its values in the split."""
    encoded = {modality for viewer in viewers for modality in viewer.after.encoders}
    return {modality: shelf_of(split, modality, most, context) for modality in split.columns if modality in encoded}


def shelf_of(split: Split, modality: str, most: int, context: DataContext) -> Shelf:
    """The values of a modality of the first items of a split."""
    column = split.modality(modality)
    flat = column.flat_values()
    lengths = list_lengths(column.values) if column.nested else np.ones(len(split), np.int64)
    items = np.repeat(np.arange(len(split)), lengths)
    count = int(lengths[:most].sum())
    raw = enumerate(flat.slice(0, count).to_pylist())
    values = [_readable(column, row, value, context.pixels) for row, value in raw]
    return Shelf(modality, values, items[:count], lambda view: view.open(column, modality, context))


def _readable(column: Column, row: int, value: Any, pixels: int) -> Any:
    """A value; the bytes of a file."""
    if not isinstance(value, dict) or "bytes" not in value:
        return value
    try:
        return image_bytes(value, column.folder, pixels)
    except (OSError, ValueError) as error:
        raise RunError(f"{column.place_of(row)}: {error}; restore the data of the run") from error


def _viewers(run: Run, per_group: int) -> tuple[list[Viewer], dict[str, str]]:
    """Server and clients with models, and participants that are left out with reasons."""
    names: dict[str, list[str]] = {}
    for member in run.federation.members.values():
        names.setdefault(member.group, []).append(member.id)
    clients = [client for members in names.values() for client in members[:per_group]]
    viewers, left_out = [], {}
    for name in [*([SERVER] if run.experiment.server is not None else []), *clients]:
        try:
            viewers.append(Viewer.of(run, name))
        except (ConfigError, RunError) as error:
            left_out[name] = str(error)
    if not viewers:
        reason = next(iter(left_out.values()), "it has no participants")
        raise RunError(f"run '{run.folder}' has no model to show; {reason}")
    return viewers, left_out


def _queries(
    shown: Sequence[Retrieval], shelves: Mapping[str, Shelf], modality: str, count: int
) -> Iterator[dict[str, object]]:
    """Queries of a modality, spread over the shelf, with the retrievals of each participant."""
    shelf = shelves[modality]
    for index in map(int, np.linspace(0, len(shelf.values) - 1, min(count, len(shelf.values))).round().astype(int)):
        rows = [row for each in shown for row in each.rows(modality, index)]
        yield {"asked": shelf.entry(index, playable=True), "rows": rows}
