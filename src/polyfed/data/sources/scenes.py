"""Generated scenes: pictures of shapes with captions, labels, texts, questions and masks; no download."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError, nearest
from polyfed.data.arrow import fingerprint_of, split_of_table
from polyfed.data.scenery.drawing import picture, png
from polyfed.data.scenery.layout import LABELS, Scene, arrange
from polyfed.data.scenery.questions import ANSWERS, questions
from polyfed.data.scenery.recipe import VERSION, Domain, SceneRecipe
from polyfed.data.scenery.vocabulary import TOPICS
from polyfed.data.scenery.wording import captions, text, topic
from polyfed.data.source import Split, TableSource


class Scenes(TableSource):
    """Pictures of coloured, textured shapes in spatial relations, each split a function of the settings.

    An item has the columns ``image``, ``captions`` (five), ``label`` (texture and shape of the main thing,
    the largest), ``text`` with ``topic`` (text classification), ``questions`` with ``answers`` (lists of two
    to seven) and ``mask`` (255 where the main thing is visible, else 0), each generated when it is read.

    Scene i does not depend on the size of the split, and has the same contents, texts and id in every domain.
    """

    identified_by: ClassVar[frozenset[str] | None] = frozenset({"seed", "difficulty", "domain", "shift"})

    columns: dict[str, str] = Field(
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

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split; no picture is drawn until the image or mask column is read."""
        recipe = self.recipe(split, name)
        return split_of_table(
            lambda columns: _table(recipe, columns),
            scenes_schema(),
            source=name,
            split=split,
            ids_column="id",
            columns=self.columns,
            targets=self.targets,
            selection=self.selection(),
            fingerprint=fingerprint_of("scenes", VERSION, recipe),
            recipe=fingerprint_of("scenes", VERSION, recipe),
            where="scenes",
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
    """Schema of the table, with class names as Hugging Face metadata."""
    features = {name: column.feature for name, column in _COLUMNS.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([(name, column.kind) for name, column in _COLUMNS.items()], metadata=metadata)


@dataclass(frozen=True)
class _Generated:
    """A column: its Arrow type, its Hugging Face feature, and how the value of one scene is made."""

    kind: pa.DataType
    feature: Any
    make: Callable[[SceneRecipe, int], Any]


def _table(recipe: SceneRecipe, columns: Sequence[str]) -> pa.Table:
    """The named columns, and without names just the number of rows."""
    if not columns:
        return pa.table({"id": pa.nulls(recipe.count)}).select([])
    chosen = {name: _COLUMNS[name] for name in columns}
    return pa.table(
        {
            name: pa.array((column.make(recipe, index) for index in _counted(recipe, name)), column.kind)
            for name, column in chosen.items()
        }
    )


def _counted(recipe: SceneRecipe, column: str) -> Iterator[int]:
    return prepared(f"generating scenes: {column} ({recipe.split})", range(recipe.count), recipe.count)


def _scene(recipe: SceneRecipe, index: int) -> Scene:
    return _scenes(recipe)[index]


@lru_cache(maxsize=4)
def _scenes(recipe: SceneRecipe) -> tuple[Scene, ...]:
    return tuple(arrange(recipe, index) for index in range(recipe.count))


def _id(recipe: SceneRecipe, index: int) -> str:
    return recipe.scene_id(index)


def _image(recipe: SceneRecipe, index: int) -> dict[str, object]:
    return {
        "bytes": png(picture(_scene(recipe, index), recipe, index)[0]),
        "path": f"{recipe.scene_id(index)}.png",
    }


def _mask(recipe: SceneRecipe, index: int) -> dict[str, object]:
    return {
        "bytes": png(picture(_scene(recipe, index), recipe, index)[1]),
        "path": f"{recipe.scene_id(index)}-mask.png",
    }


def _captions(recipe: SceneRecipe, index: int) -> list[str]:
    return captions(_scene(recipe, index), recipe.difficulty, recipe.stream("captions", index))


def _label(recipe: SceneRecipe, index: int) -> int:
    return _scene(recipe, index).label


def _topic(recipe: SceneRecipe, index: int) -> int:
    return topic(_scene(recipe, index), recipe.stream("topic", index))


def _text(recipe: SceneRecipe, index: int) -> str:
    return text(_scene(recipe, index), _topic(recipe, index), recipe.difficulty, recipe.stream("text", index))


def _questions(recipe: SceneRecipe, index: int) -> list[str]:
    return [words for words, _ in questions(_scene(recipe, index), recipe.stream("questions", index))]


def _answers(recipe: SceneRecipe, index: int) -> list[int]:
    return [answer for _, answer in questions(_scene(recipe, index), recipe.stream("questions", index))]


def _classes(names: Sequence[str]) -> dict[str, object]:
    return {"_type": "ClassLabel", "names": list(names)}


_STRING = {"_type": "Value", "dtype": "string"}
_PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_COLUMNS = {
    "id": _Generated(pa.string(), _STRING, _id),
    "image": _Generated(_PICTURE, {"_type": "Image"}, _image),
    "captions": _Generated(pa.list_(pa.string()), {"_type": "List", "feature": _STRING}, _captions),
    "label": _Generated(pa.int64(), _classes(LABELS), _label),
    "text": _Generated(pa.string(), _STRING, _text),
    "topic": _Generated(pa.int64(), _classes(TOPICS), _topic),
    "questions": _Generated(pa.list_(pa.string()), {"_type": "List", "feature": _STRING}, _questions),
    "answers": _Generated(pa.list_(pa.int64()), {"_type": "List", "feature": _classes(ANSWERS)}, _answers),
    "mask": _Generated(_PICTURE, {"_type": "Image"}, _mask),
}
