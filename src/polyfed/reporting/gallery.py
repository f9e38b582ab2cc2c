"""A page of queries with what server and clients retrieve before and after the federation; it shows local data."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64
from PIL import Image, ImageOps

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import write_atomically
from polyfed.data.arrow import list_lengths
from polyfed.data.pictures import opened_picture, picture_bytes
from polyfed.data.source import Column, Split
from polyfed.federation.client import SERVER
from polyfed.models.model import ModelSettings
from polyfed.reporting.page import rendered_page
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.loaded import IMAGES, TEXTS, LoadedModel, loaded_model
from polyfed.runs.opened import Run

_SIDE = 112  # pixels of a thumbnail
_KINDS = (IMAGES, TEXTS)


class GalleryEntry(NamedTuple):
    """What was retrieved, or asked with: a picture as a data URI, or a text; whether it belongs to the query."""

    picture: str
    text: str
    similarity: float = 1.0
    right: bool = False


@dataclass(frozen=True)
class Shelf:
    """Values of one kind that are retrieved: encoded pictures or texts, each of an item."""

    kind: str
    values: Sequence[bytes] | Sequence[str]
    items: Int64[np.ndarray, " n"]

    def entry(self, place: int, similarity: float = 1.0, right: bool = False) -> GalleryEntry:
        """One value as it is shown."""
        value = self.values[place]
        return (
            GalleryEntry("", value, similarity, right)
            if isinstance(value, str)
            else GalleryEntry(thumbnail(value), "", similarity, right)
        )


@dataclass(frozen=True)
class Viewer:
    """A participant: its model before and after the federation, and what it retrieves of which kind for which."""

    name: str
    before: LoadedModel
    after: LoadedModel

    @classmethod
    def of(cls, run: Run, name: str) -> Viewer:
        """Initial weights depend on seed and participant alone, so that no run has to keep them."""
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
        """Kind of the query and of what is retrieved: across, where the model has both; else within its one kind."""
        kinds = tuple(kind for kind in _KINDS if self.after.takes(kind))
        return ((TEXTS, IMAGES), (IMAGES, TEXTS)) if len(kinds) == 2 else tuple((kind, kind) for kind in kinds)


def write_gallery(
    run: Run, out: Path | None = None, *, queries: int = 6, k: int = 5, most: int = 500, per_group: int = 1
) -> Path:
    """Write the page, with pictures and texts of the test data in it: it must stay where these data may be.

    Before is the model with its initial weights; after is the server's best, and what the clients have last.

    Args:
        run: with its data at hand.
        out: the file, by default ``gallery.html`` in the run folder.
        queries: of each kind, spread over the test data.
        k: how many are shown for each query.
        most: test items at most, the first ones.
        per_group: clients shown of each group.

    Raises:
        RunError: nobody has test data, or no model is kept.
        ConfigError, DataError: as for the run's models and data.
    """
    split = _test_split(run)
    pixels = run.federation.data.context.pixels
    shelves = {kind: shelf for kind in _KINDS if (shelf := _shelf(split, kind, most, pixels))}
    viewers, left_out = _viewers(run, shelves, per_group)
    shown = [Retrieval(viewer, shelves, k) for viewer in viewers]
    content: dict[str, Any] = {
        "run": run.name,
        "source": f"{split.source}, {split.name}",
        "size": ", ".join(f"{len(shelf.values):,} {kind}s" for kind, shelf in shelves.items()),
        "k": k,
        "queries": [query for kind in shelves for query in _queries(shown, shelves, kind, queries)],
        "table": TextTable(
            f"Queries whose right answer is among the first {k}, per cent of all",
            ["participant", "direction", "before", "after"],
            [row for each in shown for row in each.summary()],
        ),
        "left_out": left_out,
    }
    path = run.folder / "gallery.html" if out is None else out
    write_atomically(path, rendered_page("gallery.html.j2", title=f"{run.name}: gallery", **content).encode())
    return path


class Retrieval:
    """What a participant retrieves for every value of a shelf, before and after.

    Args:
        viewer: the participant.
        shelves: by kind.
        k: how many are shown for each query.
    """

    def __init__(self, viewer: Viewer, shelves: Mapping[str, Shelf], k: int) -> None:
        self.viewer, self.shelves, self.k = viewer, shelves, k
        self._scores = {
            (when, *direction): self._compared(model, *direction)
            for when, model in (("before", viewer.before), ("after", viewer.after))
            for direction in viewer.directions
            if set(direction) <= shelves.keys()
        }

    def retrieved(self, when: str, kind: str, place: int) -> list[GalleryEntry]:
        """The first k for the value at a place of the shelf of a kind; none if the participant knows no such query."""
        for (moment, asked, given), scores in self._scores.items():
            if (moment, asked) == (when, kind):
                shelf, own = self.shelves[given], self.shelves[asked].items[place]
                order = np.argsort(-scores[place], kind="stable")[: self.k]
                return [
                    shelf.entry(int(hit), float(scores[place, hit]), bool(shelf.items[hit] == own)) for hit in order
                ]
        return []

    def summary(self) -> Iterator[list[str]]:
        # within a kind only some queries have a right answer: the other captions of a picture
        for asked, given in dict.fromkeys(key[1:] for key in self._scores if key[1] != key[2]):
            shares = [figure(100 * float(self._hits(when, asked, given).mean())) for when in ("before", "after")]
            yield [self.viewer.name, f"{asked} to {given}", *shares]

    def _hits(self, when: str, asked: str, given: str) -> Bool[np.ndarray, " n"]:
        scores = self._scores[when, asked, given]
        first = np.argsort(-scores, axis=1, kind="stable")[:, : self.k]
        hits: Bool[np.ndarray, " n"] = (self.shelves[given].items[first] == self.shelves[asked].items[:, None]).any(1)
        return hits

    def _compared(self, model: LoadedModel, asked: str, given: str) -> Float[np.ndarray, "n m"]:
        vectors = {
            kind: model.encode_modality(model.modality_of(kind), self.shelves[kind].values) for kind in {asked, given}
        }
        scores: Float[np.ndarray, "n m"] = vectors[asked] @ vectors[given].T
        if asked == given:
            np.fill_diagonal(scores, -2.0)  # nobody asks for what is at hand
        return scores


def thumbnail(data: bytes) -> str:
    """A small JPEG of an encoded picture as a data URI."""
    with opened_picture(data) as image:
        image.draft("RGB", (2 * _SIDE, 2 * _SIDE))
        small = ImageOps.exif_transpose(image).convert("RGB")
        small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def picture_shelf(run: Run, most: int) -> tuple[str, Shelf | None]:
    """The pictures of a run's test data and what these are called; None where they have none."""
    split = _test_split(run)
    return f"{split.source}, {split.name}", _shelf(split, IMAGES, most, run.federation.data.context.pixels)


def _test_split(run: Run) -> Split:
    """Test data that show most: the server's, else those of the first group, one with pictures and texts before."""
    federation, experiment = run.federation, run.experiment
    if experiment.server is not None:
        return federation.data.split(experiment.server.source, experiment.server.test_split)
    groups = [group for group in experiment.clients.values() if group.test_split is not None]
    if not groups:
        raise RunError(f"nobody in '{run.folder}' has test data to retrieve; set test_split of a group")
    chosen = max(groups, key=lambda group: len(group.models[0].encoders))
    return federation.data.split(chosen.source, str(chosen.test_split))


def _shelf(split: Split, kind: str, most: int, pixels: int) -> Shelf | None:
    """The values of a kind of the first items of a split; None where it has none."""
    if kind not in split.columns:
        return None
    column = split.modality(kind)
    flat = column.flat_values()
    lengths = list_lengths(column.values) if column.nested else np.ones(len(split), np.int64)
    items = np.repeat(np.arange(len(split)), lengths)
    count = int(lengths[:most].sum())
    values = flat.slice(0, count).to_pylist()
    if kind == IMAGES:
        values = [_readable(column, row, value, pixels) for row, value in enumerate(values)]
    return Shelf(kind, values, items[:count])


def _readable(column: Column, row: int, value: object, pixels: int) -> bytes:
    try:
        return picture_bytes(value, column.folder, pixels)
    except (OSError, ValueError) as error:
        raise RunError(f"{column.place_of(row)}: {error}; restore the data of the run") from error


def _viewers(run: Run, shelves: Mapping[str, Shelf], per_group: int) -> tuple[list[Viewer], dict[str, str]]:
    """Server and clients with models for what there is, and of others why they are not shown."""
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
        raise RunError(f"run '{run.folder}' has no model to show; {next(iter(left_out.values()), 'it has nobody')}")
    return viewers, left_out


def _queries(
    shown: Sequence[Retrieval], shelves: Mapping[str, Shelf], kind: str, count: int
) -> Iterator[dict[str, object]]:
    """Queries of a kind, spread over the shelf, with what each participant retrieves."""
    shelf = shelves[kind]
    places = np.linspace(0, len(shelf.values) - 1, min(count, len(shelf.values))).round().astype(int)
    for place in map(int, places):
        rows = [
            {"name": each.viewer.name, **{when: each.retrieved(when, kind, place) for when in ("before", "after")}}
            for each in shown
        ]
        yield {"asked": shelf.entry(place), "rows": [row for row in rows if row["after"]]}
