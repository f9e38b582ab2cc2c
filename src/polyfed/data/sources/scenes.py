"""Generated scenes: pictures of shapes with captions, labels, questions, masks, sounds and attributes; no download."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError, nearest
from polyfed.data.arrow import fingerprint_of
from polyfed.data.scenery.attributes import ATTRIBUTES, attribute
from polyfed.data.scenery.drawing import picture, png
from polyfed.data.scenery.layout import LABELS, VERSION, Domain, SceneRecipe, arrange, shown
from polyfed.data.scenery.questions import ANSWERS, questions
from polyfed.data.scenery.sound import RATE, recording
from polyfed.data.scenery.wording import TOPICS, captions, text, topic
from polyfed.data.sounds import wav
from polyfed.data.source import ColumnNames
from polyfed.data.tables import SplitTable, TableSource


class Scenes(TableSource):
    """Pictures of coloured, textured shapes in spatial relations, each split a function of the settings.

    An item has the columns ``image``, ``captions`` (five), ``label`` (texture and shape of the main thing,
    the largest), ``text`` with ``topic`` (text classification), ``questions`` with ``answers`` (lists of two
    to seven), ``mask`` (255 where the main thing is visible, else 0), ``audio`` (a second of 8 kHz in which each thing
    is a tone) and those of a table, ``things``, ``colours``, ``colour``, ``other_colour``, ``size``, ``corners``,
    ``other_corners``, ``x``, ``y``, ``other_x``, ``other_y``, each generated when it is read.

    Scene i does not depend on the size of the split, and has the same contents, texts and id in every domain.
    """

    columns: dict[str, ColumnNames] = Field(
        default={"image": "image", "text": "captions"}, description="modality -> column that holds it"
    )
    targets: dict[str, str] = Field(
        default={"label": "label"}, description="target name -> column: label, topic or answers"
    )
    train: int = Field(default=2000, ge=0, le=1_000_000, description="training scenes")
    validation: int = Field(default=300, ge=0, le=1_000_000, description="validation scenes")
    test: int = Field(default=300, ge=0, le=1_000_000, description="test scenes")
    size: int = Field(default=64, ge=16, le=512, description="height and width of a picture in pixels")
    seed: int = Field(default=0, ge=0, lt=2**63, description="another seed gives other scenes")
    difficulty: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="more things, clutter, noise and look-alike scenes; vaguer and more relational captions",
    )
    domain: Domain = Field(default="day", description="style of the pictures: day, night or sketch")
    shift: float = Field(
        default=0.0, ge=0, le=1, description="how far colours and contrast are moved from the domain's own"
    )

    def most_items(self, split: str, name: str) -> int:
        """See ``Source``."""
        there = self.recipe(split, name).count
        return min(there, self.first.get(split, there))

    def table(self, split: str, *, name: str, data_dir: Path | None) -> SplitTable:
        """The table of one split; no picture is drawn until the image or mask column is read."""
        recipe = self.recipe(split, name)
        stamp = fingerprint_of("scenes", VERSION, recipe)
        return SplitTable(
            read=lambda column: (_kept if _is_light(recipe, column) else _generated)(recipe, column),
            count=lambda: recipe.count,
            schema=scenes_schema(),
            where="scenes",
            split=split,
            fingerprint=stamp,
            ids="id",
            recipe=stamp,
            take=lambda column, rows: _generated(recipe, column, rows.tolist()),
        )

    def recipe(self, split: str, name: str = "scenes") -> SceneRecipe:
        """What one split is generated from.

        Raises:
            DataError: there is no such split, or it has no scenes.
        """
        counts = {"train": self.train, "validation": self.validation, "test": self.test}
        if split not in counts:
            raise DataError(f"source '{name}': no split '{split}'; {nearest(split, counts)}")
        if counts[split] == 0:
            raise DataError(f"source '{name}': split '{split}' is empty, as {split}=0; set {split} to 1 or more")
        return SceneRecipe(self.seed, split, counts[split], self.size, self.difficulty, self.domain, self.shift)


def scenes_schema() -> pa.Schema:
    features = {name: feature for name, (_, feature, _) in _COLUMNS.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([(name, kind) for name, (kind, _, _) in _COLUMNS.items()], metadata=metadata)


def _generated(recipe: SceneRecipe, column: str, rows: Sequence[int] | None = None) -> pa.ChunkedArray:
    kind, _, make = _COLUMNS[column]
    what = f"generating scenes: {column} ({recipe.split})"
    chosen = range(recipe.count) if rows is None else rows
    numbers = prepared(what, chosen, len(chosen))
    return pa.chunked_array([pa.array((make(recipe, number) for number in numbers), kind)])


def _is_light(recipe: SceneRecipe, column: str) -> bool:
    return recipe.count <= 5000 and column not in ("image", "mask", "audio")


# texts and labels of a split are read again for each view of it, and by every experiment that has the split
_kept = lru_cache(maxsize=64)(_generated)


# all columns are made of the same scenes; so many bound memory
drawn_scene = lru_cache(maxsize=40_000)(arrange)


def _png(recipe: SceneRecipe, index: int, *, mask: bool = False) -> dict[str, object]:
    pixels = picture(drawn_scene(recipe, index), recipe, index)[mask]
    return {"bytes": png(pixels), "path": f"{recipe.scene_id(index)}{'-mask' if mask else ''}.png"}


def _sound(recipe: SceneRecipe, index: int) -> dict[str, object]:
    samples = recording(drawn_scene(recipe, index), recipe, index)
    return {"bytes": wav(samples, RATE), "path": f"{recipe.scene_id(index)}.wav"}


def _attribute(name: str, recipe: SceneRecipe, index: int) -> float | str | None:
    return attribute(name, drawn_scene(recipe, index), recipe, index)


def _captions(recipe: SceneRecipe, index: int) -> list[str]:
    return captions(drawn_scene(recipe, index), recipe.difficulty, recipe.stream("captions", index))


def _topic(recipe: SceneRecipe, index: int) -> int:
    return topic(shown(recipe, index), recipe.stream("topic", index))


def _text(recipe: SceneRecipe, index: int) -> str:
    # a stream for each purpose: reading one column must not change another
    rng = recipe.stream("text", index)
    return text(drawn_scene(recipe, index), _topic(recipe, index), recipe.difficulty, rng)


def _asked(recipe: SceneRecipe, index: int) -> list[tuple[str, int]]:
    return questions(drawn_scene(recipe, index), recipe.stream("questions", index))


def _classes(names: Sequence[str]) -> dict[str, object]:
    return {"_type": "ClassLabel", "names": list(names)}


def _list(feature: object) -> dict[str, object]:
    return {"_type": "List", "feature": feature}


_STRING = {"_type": "Value", "dtype": "string"}
_FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
# column -> Arrow type, Hugging Face feature, and how the value of one scene is made
_COLUMNS: dict[str, tuple[pa.DataType, Any, Callable[[SceneRecipe, int], Any]]] = {
    "id": (pa.string(), _STRING, SceneRecipe.scene_id),
    "image": (_FILE, {"_type": "Image"}, _png),
    "captions": (pa.list_(pa.string()), _list(_STRING), _captions),
    "label": (pa.int64(), _classes(LABELS), lambda recipe, index: shown(recipe, index).label),
    "text": (pa.string(), _STRING, _text),
    "topic": (pa.int64(), _classes(TOPICS), _topic),
    "questions": (pa.list_(pa.string()), _list(_STRING), lambda *scene: [words for words, _ in _asked(*scene)]),
    "answers": (
        pa.list_(pa.int64()),
        _list(_classes(ANSWERS)),
        lambda *scene: [answer for _, answer in _asked(*scene)],
    ),
    "mask": (_FILE, {"_type": "Image"}, partial(_png, mask=True)),
    "audio": (_FILE, {"_type": "Audio"}, _sound),
    **{
        name: (kind, {"_type": "Value", "dtype": str(kind).replace("double", "float64")}, partial(_attribute, name))
        for name, (kind, _) in ATTRIBUTES.items()
    },
}
