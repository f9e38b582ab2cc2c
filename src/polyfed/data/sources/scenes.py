"""Generated scenes: images of shapes with captions, labels, questions, masks, sounds and attributes; no download."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError, nearest
from polyfed.data import scenery
from polyfed.data.arrow import IMAGE, fingerprint_of
from polyfed.data.sounds import wav
from polyfed.data.source import ColumnNames
from polyfed.data.tables import SplitTable, TableSource


class Scenes(TableSource):
    """Images of coloured, textured shapes in spatial relations, each split a function of the settings.

    An item has the columns ``image``, ``captions`` (five), ``label`` (texture and shape of the main thing,
    the largest), ``text`` with ``topic`` (text classification), ``questions`` with ``answers`` (lists of two
    to seven), ``mask`` (255 where the main thing is visible, else 0), ``audio`` (a second of 8 kHz in which each thing
    is a tone) and those of a table, ``things``, ``colours``, ``colour``, ``other_colour``, ``size``, ``corners``,
    ``other_corners``, ``x``, ``y``, ``other_x``, ``other_y``, each generated when it is read.

    Scene i does not depend on the size of the split, and has the same contents, texts and id in every domain.
    """

    columns: dict[str, ColumnNames] = Field(
        default={"image": "image", "text": "captions"}, description="modality -> column"
    )
    targets: dict[str, str] = Field(default={"label": "label"}, description="target -> column: label, topic or answers")
    train: int = Field(default=2000, ge=0, le=1_000_000, description="training scenes")
    validation: int = Field(default=300, ge=0, le=1_000_000, description="validation scenes")
    test: int = Field(default=300, ge=0, le=1_000_000, description="test scenes")
    size: int = Field(default=64, ge=16, le=512, description="height and width of an image in pixels")
    seed: int = Field(default=0, ge=0, lt=2**63, description="another seed gives other scenes")
    difficulty: float = Field(default=0.5, ge=0, le=1, description="clutter, noise, look-alikes and vague captions")
    domain: scenery.Domain = Field(default="day", description="style of the images: day, night or sketch")
    shift: float = Field(default=0.0, ge=0, le=1, description="how far colours and contrast move from the domain's")

    def most_items(self, split: str, name: str) -> int:
        """See ``Source``."""
        there = self.recipe(split, name).count
        return min(there, self.first.get(split, there))

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The table of one split; no image is drawn until the image or mask column is read."""
        recipe = self.recipe(split, name)
        stamp = fingerprint_of("scenes", scenery.VERSION, recipe)
        return SplitTable(
            read=lambda column: _generated(recipe, column),
            count=lambda: recipe.count,
            schema=SCHEMA,
            where="scenes",
            split=split,
            key=lambda column: stamp,
            ids="id",
            recipe=stamp,
            sizes=_SIZES,
            take=lambda column, rows: _generated(recipe, column, rows.tolist()),
        )

    def recipe(self, split: str, name: str = "scenes") -> scenery.SceneRecipe:
        """Recipe of one split.

        Raises:
            DataError: the split does not exist or is empty.
        """
        counts = {"train": self.train, "validation": self.validation, "test": self.test}
        if split not in counts:
            raise DataError(f"source '{name}': no split '{split}'; {nearest(split, counts)}")
        if counts[split] == 0:
            raise DataError(f"source '{name}': split '{split}' is empty, as {split}=0; set {split} to 1 or more")
        return scenery.SceneRecipe(self.seed, split, counts[split], self.size, self.difficulty, self.domain, self.shift)


def _generated(recipe: scenery.SceneRecipe, column: str, rows: Sequence[int] | None = None) -> pa.ChunkedArray:
    dtype, _, make = _COLUMNS[column]
    chosen = range(recipe.count) if rows is None else rows
    numbers = prepared(f"generating scenes: {column} ({recipe.split})", chosen, len(chosen))
    if dtype != IMAGE:
        make = _kept(make)
    return pa.chunked_array([pa.array((make(recipe, number) for number in numbers), dtype)])


# texts and labels are read again for each view of a split, and by every experiment that has the split
_kept = cache(lru_cache(maxsize=10_000))


# all columns are made of the same scenes; so many bound memory
drawn_scene = lru_cache(maxsize=40_000)(scenery.arrange)


def _png(recipe: scenery.SceneRecipe, index: int, *, mask: bool = False) -> dict[str, object]:
    pixels = scenery.render(drawn_scene(recipe, index), recipe, index)[mask]
    return {"bytes": scenery.png(pixels), "path": f"{recipe.scene_id(index)}{'-mask' if mask else ''}.png"}


def _sound(recipe: scenery.SceneRecipe, index: int) -> dict[str, object]:
    samples = scenery.recording(drawn_scene(recipe, index), recipe, index)
    return {"bytes": wav(samples, scenery.RATE), "path": f"{recipe.scene_id(index)}.wav"}


def _captions(recipe: scenery.SceneRecipe, index: int) -> list[str]:
    return scenery.captions(drawn_scene(recipe, index), recipe.difficulty, recipe.stream("captions", index))


def _topic(recipe: scenery.SceneRecipe, index: int) -> int:
    return scenery.topic(scenery.shown(recipe, index), recipe.stream("topic", index))


def _text(recipe: scenery.SceneRecipe, index: int) -> str:
    # a stream for each purpose: reading one column must not change another
    rng = recipe.stream("text", index)
    return scenery.text(drawn_scene(recipe, index), _topic(recipe, index), recipe.difficulty, rng)


def _asked(recipe: scenery.SceneRecipe, index: int, part: int) -> list[str | int]:
    return [pair[part] for pair in scenery.questions(drawn_scene(recipe, index), recipe.stream("questions", index))]


def _attribute(name: str, recipe: scenery.SceneRecipe, index: int) -> float | str | None:
    """A cell of the table; None where unknown, more often for higher difficulty."""
    if recipe.stream(f"gap {name}", index).random() < _GAPS * recipe.difficulty:
        return None
    return ATTRIBUTES[name][1](drawn_scene(recipe, index))


def _corners(number: int) -> Callable[[scenery.Scene], int]:
    return lambda scene: scenery.TABLES["shapes"][scene.things[number].shape]["corners"]


_GAPS = 0.2  # share of unknown cells in the hardest tables

# column -> type, and its value in a scene; the main thing is the first, the one it is related to the second
ATTRIBUTES: dict[str, tuple[str, Callable[[scenery.Scene], float | str]]] = {
    "things": ("int64", lambda scene: len(scene.things)),
    "colours": ("int64", lambda scene: len({thing.colour for thing in scene.things})),
    "colour": ("string", lambda scene: scene.things[0].colour),
    "other_colour": ("string", lambda scene: scene.things[1].colour),
    "size": ("string", lambda scene: scene.things[0].size),
    "corners": ("int64", _corners(0)),
    "other_corners": ("int64", _corners(1)),
    "x": ("float64", lambda scene: scene.things[0].x),
    "y": ("float64", lambda scene: scene.things[0].y),
    "other_x": ("float64", lambda scene: scene.things[1].x),
    "other_y": ("float64", lambda scene: scene.things[1].y),
}

_STRING = {"_type": "Value", "dtype": "string"}
_STRINGS = {"_type": "List", "feature": _STRING}
_ANSWERS = {"_type": "ClassLabel", "names": list(scenery.ANSWERS)}
_LABELS = {"_type": "ClassLabel", "names": list(scenery.LABELS)}
# column -> Arrow type, Hugging Face feature, and how the value of one scene is made
_COLUMNS: dict[str, tuple[pa.DataType, Any, Callable[[scenery.SceneRecipe, int], Any]]] = {
    "id": (pa.string(), _STRING, scenery.SceneRecipe.scene_id),
    "image": (IMAGE, {"_type": "Image"}, _png),
    "captions": (pa.list_(pa.string()), _STRINGS, _captions),
    "label": (pa.int64(), _LABELS, lambda *scene: scenery.shown(*scene).label),
    "text": (pa.string(), _STRING, _text),
    "topic": (pa.int64(), {"_type": "ClassLabel", "names": list(scenery.TOPICS)}, _topic),
    "questions": (pa.list_(pa.string()), _STRINGS, partial(_asked, part=0)),
    "answers": (pa.list_(pa.int64()), {"_type": "List", "feature": _ANSWERS}, partial(_asked, part=1)),
    "mask": (IMAGE, {"_type": "Image"}, partial(_png, mask=True)),
    "audio": (IMAGE, {"_type": "Audio"}, _sound),
    **{
        name: (pa.type_for_alias(dtype), {"_type": "Value", "dtype": dtype}, partial(_attribute, name))
        for name, (dtype, _) in ATTRIBUTES.items()
    },
}

# of columns without gaps whose values are as many in every scene
_SIZES = {"image": 1, "mask": 1, "audio": 1, "text": 1, "captions": scenery.CAPTIONS}
_FEATURES = {"info": {"features": {name: feature for name, (_, feature, _) in _COLUMNS.items()}}}
SCHEMA = pa.schema(
    [(name, column[0]) for name, column in _COLUMNS.items()], metadata={"huggingface": json.dumps(_FEATURES)}
)
"""Schema of every split, with class names in the Hugging Face metadata."""
