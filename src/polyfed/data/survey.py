"""Survey of a complete data set before settings are chosen: images, masks, class names, texts, groups.

Ambiguous data are refused, with the setting for each meaning; everything else is reported.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from polyfed.core.activity import prepared
from polyfed.core.errors import DataError
from polyfed.core.untrusted import yaml_content
from polyfed.data.arrow import is_text
from polyfed.data.images import image_bytes, mask_levels, opened_image, reason_of, scaling_of
from polyfed.data.tables import SplitTable, spellings, value_digest

Tables = Mapping[str, SplitTable]
"""Split -> its table."""

_ORIENTATION = 0x0112  # of EXIF
_TURNED = (5, 6, 7, 8)  # by a quarter turn
_ASPECT = 0.02  # relative difference of two aspects that rounding to whole pixels explains
_OBJECTS = 2  # objects in a mask above which numbers without gaps are hardly classes
_EXTREME, _BLURRED = 16, 0.2  # grey values taken for black or white, and the share of others in a blurred mask
_LEVELS = 4  # different grey values of a blurred mask at least, where it has any
_IGNORED = 255
_SHOWN = 9


class ImageFacts(NamedTuple):
    """Facts about an image file.

    Attributes:
        name: Path, or row.
        size: Width and height as stored.
        orientation: EXIF orientation, 1 without one.
        depth: Scale of its values; empty for 8 bits.
        digest: Digest of its bytes.
    """

    name: str
    size: tuple[int, int]
    orientation: int
    depth: str
    digest: str

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height as displayed."""
        width, height = self.size
        return (height, width) if self.orientation in _TURNED else (width, height)


class MaskFacts(NamedTuple):
    """Values of a mask.

    Attributes:
        grey: Pixels with each value of the first channel [256].
        numbers: Pixels with each palette number, or grey value [256]; None for colour images.
        colours: Palette number, or "" without a palette -> colours whose channels differ.
        is_clear: True if pixels are transparent.
        is_deep: True if values exceed 255.
    """

    grey: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64] | None
    colours: Mapping[int | str, frozenset[tuple[int, ...]]]
    is_clear: bool
    is_deep: bool


def _rows(tables: Tables, column: str) -> Iterator[tuple[str, SplitTable, Any]]:
    for split, table in tables.items():
        for row, value in enumerate(table.read(column).to_pylist()):
            name = (value or {}).get("path") if isinstance(value, dict) else None
            yield str(name or f"{split}, row {row}"), table, value


def _count(tables: Tables) -> int:
    return sum(table.count() for table in tables.values())


def images_of(tables: Tables, column: str) -> tuple[list[ImageFacts | None], list[str]]:
    """Facts about each image (None: unreadable), and a note on each that cannot be read."""
    facts, broken = list[ImageFacts | None](), list[str]()
    for name, table, value in prepared(f"checking images ({column})", _rows(tables, column), _count(tables)):
        try:
            data = image_bytes(value, table.folder)
            with opened_image(data) as image:
                orientation = int(image.getexif().get(_ORIENTATION, 1) or 1)
                scaling = scaling_of(image)
                depth = scaling.words if scaling else ""
                facts.append(ImageFacts(name, image.size, orientation, depth, value_digest(data, None)))
        except Exception as error:  # Pillow's decoders raise errors of any type
            facts.append(None)
            broken += [] if value is None else [f"{name}: {reason_of(error)}"]
    return facts, broken


def image_notes(facts: Sequence[ImageFacts | None]) -> list[str]:
    """Notes on depths and aspects of images that training treats alike."""
    read = [one for one in facts if one is not None]
    lines = list[str]()
    depths = Counter(one.depth for one in read)
    if len(depths) > 1 or (depths and "" not in depths):
        shown = ", ".join(f"{number} of {depth or '8 bits'}" for depth, number in depths.most_common())
        alike = "" if len(depths) == 1 else "; each has its own scale: write all with one depth if they mean the same"
        lines.append(f"depths of images: {shown}{alike}")
    aspects = sorted(width / height for width, height in (one.upright for one in read))
    if aspects and aspects[-1] > 1.5 * aspects[0]:
        span = f"width / height from {aspects[0]:.2f} to {aspects[-1]:.2f}"
        lines.append(f"images have {span}, and are squashed to squares; `fit: crop` of the view cuts the middle out")
    return lines


def equal_in_two_splits(tables: Tables, column: str, images: Sequence[ImageFacts | None]) -> list[tuple[str, str]]:
    """Pairs of items of two splits with equal images, recordings or texts.

    Args:
        tables: Tables of the splits.
        column: Column of images, recordings or texts.
        images: Facts about the images in it, if it has any.
    """
    digests = [one and one.digest for one in images] or [_digest(own, value) for _, own, value in _rows(tables, column)]
    splits = chain.from_iterable([split] * table.count() for split, table in tables.items())
    first: dict[str, tuple[str, str]] = {}
    equal = []
    for split, (name, _, _), digest in zip(splits, _rows(tables, column), digests, strict=True):
        if digest is not None and first.setdefault(digest, (split, name))[0] != split:
            equal.append((": ".join(first[digest]), f"{split}: {name}"))
    return equal


def _digest(table: SplitTable, value: Any) -> str | None:
    try:
        return None if value is None else value_digest(value, table.folder)
    except (OSError, ValueError):  # views report unreadable values
        return None


# ---- masks


@dataclass(frozen=True)
class MaskSurvey:
    """All masks of a data set, with their images.

    Attributes:
        place: Name of the data, for messages.
        images, masks: Facts about files, in the same order.
        values: Name of a readable mask -> its values.
    """

    place: str
    images: Sequence[ImageFacts | None]
    masks: Sequence[ImageFacts | None]
    values: Mapping[str, MaskFacts] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: Tables, image: str, mask: str) -> MaskSurvey:
        """Survey of every image and mask.

        Raises:
            DataError: a mask cannot be read.
        """
        images, _ = images_of(tables, image)
        masks, broken = images_of(tables, mask)
        place = f"{next(iter(tables.values())).where}, column '{mask}'"
        if broken:
            raise DataError(f"{place}: {len(broken)} masks cannot be read, first {broken[0]}; mend or leave them out")
        rows = prepared(f"checking masks ({mask})", _rows(tables, mask), _count(tables))
        values = {name: _values_of(image_bytes(value, own.folder)) for name, own, value in rows if value is not None}
        if not values:
            raise DataError(f"{place}: no row has a mask; name the column of masks 'mask', or add them")
        return cls(place, images, masks, values)

    def require_one_aspect(self) -> None:
        """Refuse masks with another aspect than their images, or possibly drawn before the images were turned.

        Raises:
            DataError: names the first such image and the remedy.
        """
        pairs = [(one, mask) for one, mask in zip(self.images, self.masks, strict=True) if one and mask]
        turned = [pair for pair in pairs if pair[0].orientation != pair[1].orientation]
        turned = [(one, mask) for one, mask in turned if _same_aspect(one.size, mask.upright)]
        if turned:
            one, mask = turned[0]
            raise DataError(
                f"{self.place}: {len(turned)} of {len(pairs)} images are turned by EXIF and their masks are not, "
                f"such as '{one.name}' ({_by(one.size)} stored, {_by(one.upright)} upright, mask "
                f"{_by(mask.upright)}). If masks were drawn on the stored pixels, take the mark out of the images "
                "(exiftool -Orientation= -r FOLDER); if on upright images, turn the pixels (mogrify -auto-orient)"
            )
        if others := [(one, mask) for one, mask in pairs if not _same_aspect(one.upright, mask.upright)]:
            one, mask = others[0]
            raise DataError(
                f"{self.place}: {len(others)} of {len(pairs)} masks have another aspect than their images, such as "
                f"'{one.name}' ({_by(one.upright)}, mask {_by(mask.upright)}); write masks of the images' own size"
            )

    # ---- what values mean

    @cached_property
    def _all(self) -> list[int]:
        return np.flatnonzero(self._total).tolist()

    @cached_property
    def _total(self) -> npt.NDArray[np.int64]:
        total: npt.NDArray[np.int64] = np.sum([one.grey for one in self.values.values()], axis=0)
        return total

    def meaning(self) -> tuple[str, str]:
        """Settings of a segmentation task as YAML, and the reason for them.

        Raises:
            DataError: values have no meaning, or two; lists the setting for each.
        """
        self._require_plain()
        if len(self._all) == 2:
            reason = f"all {len(self.values)} masks have the values {_listed(self._all)}"
            return f"threshold: {sum(self._all) // 2}", reason
        if self._is_blurred:
            return "threshold: 127", "masks are black and white, with few values between (blurred, or compressed)"
        self._require_one_code()
        numbers = [value for value in self._numbers if value != _IGNORED]
        if len(numbers) < 2 or numbers[-1] >= 2 * len(numbers):
            what = f"values {_listed(self._all)}, which are not numbers 0, 1, 2, ... of classes"
            raise self._refusal(what, {"threshold: 0": "all above 0 is one object"})
        reason = f"values {_listed(self._numbers)} are taken for numbers of classes (of objects: write threshold: 0)"
        return _names_of(numbers[-1], is_ignored=_IGNORED in self._numbers), reason

    def agreed(self, text: str) -> tuple[str, str]:
        """Settings given by the user as ``text``, if the masks fit them, and their origin.

        Raises:
            DataError: the text does not hold such settings, or masks have other values.
        """
        self._require_plain()
        try:
            given = yaml_content(text if text.strip().startswith("{") else "{" + text + "}")
        except ValueError as error:
            raise DataError(f"--mask-values {text}: is not YAML ({error}); write 'threshold: 0', or names") from error
        types = {"threshold": int, "names": list, "ignore": int}
        if not isinstance(given, dict) or not all(isinstance(given[key], types.get(key, ())) for key in given):
            raise DataError(f"--mask-values {text}: write threshold: N, or names: [background, ...] and ignore: N")
        names, wrong = given.get("names"), ""
        if names is not None and len(names) > 2:
            over = [value for value in self._numbers if value >= len(names) and value != given.get("ignore")]
            wrong = f"masks have {_listed(over or self._all)}" if over or not self._numbers else ""
        else:
            # two names are separated by a threshold: numbers 0 and 1 by 0
            given.setdefault("threshold", 0 if self._all[-1] < _IGNORED else 127)
            if not self._all[0] <= given["threshold"] < self._all[-1]:
                wrong = f"masks have values {_listed(self._all)}, which it does not divide"
        if wrong:
            raise DataError(f"--mask-values {text}: {wrong}; write settings that cover all values")
        settings = ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
        return settings, "by --mask-values"

    @cached_property
    def _numbers(self) -> list[int]:
        """Palette numbers and grey values of all masks; empty if one has other values."""
        counts = [one.numbers for one in self.values.values() if one.numbers is not None]
        return np.flatnonzero(np.sum(counts, axis=0)).tolist() if len(counts) == len(self.values) else []

    @property
    def _is_blurred(self) -> bool:
        """True if most pixels of each mask are black or white, and the others have too many values for numbers."""
        if any(one.is_deep for one in self.values.values()):
            return False
        between = [one.grey[_EXTREME : 256 - _EXTREME] for one in self.values.values()]
        shares = [part.sum() / one.grey.sum() for part, one in zip(between, self.values.values(), strict=True)]
        levels = sorted(int((part > 0).sum()) for part in between if part.any())
        black, white = self._total[:_EXTREME].sum(), self._total[256 - _EXTREME :].sum()
        has_levels = levels[len(levels) // 2] >= _LEVELS if levels else len(self._all) > 2 * _LEVELS
        return bool(len(self._all) > 2 and black and white and max(shares) <= _BLURRED and has_levels)

    def _require_plain(self) -> None:
        """Refuse masks with transparency, or with colours that do not stand for one value each."""
        if clear := [name for name, one in self.values.items() if one.is_clear]:
            raise self._refusal(f"'{clear[0]}' is partly transparent", {})
        meanings: dict[int | str, set[tuple[int, ...]]] = {}
        for one in self.values.values():
            for number, colours in one.colours.items():
                meanings.setdefault(number, set()).update(colours)
        plain = sorted(meanings.pop("", ()))
        if plain and (len(plain) > 2 or len(self._all) != 2):
            raise self._refusal(f"colours such as {', '.join(map(str, plain[:3]))} in place of numbers", {})
        if differing := [(number, sorted(colours)) for number, colours in meanings.items() if len(colours) > 1]:
            number, (first, second, *_) = differing[0]
            raise self._refusal(f"palettes that differ: number {number} is {first} and {second}", {})
        grey = [name for name, one in self.values.items() if not one.colours and _used(one)]
        if meanings and grey:
            raise self._refusal(f"a palette in some and grey values in others, such as '{grey[0]}'", {})

    def _require_one_code(self) -> None:
        """Refuse object numbers, and masks with different values for possibly the same class."""
        held = {name: _used(one) for name, one in self.values.items()}
        single = Counter(values[-1] for values in held.values() if len(values) == 1)
        if len(single) > 1 and sum(single.values()) == sum(map(bool, held.values())):
            named = {value: next(name for name, values in held.items() if values == [value]) for value in single}
            shown = ", ".join(f"{number} with {value} ('{named[value]}')" for value, number in single.most_common(3))
            if sorted(single) != list(range(1, len(single) + 1)):
                numbers = [value for value in sorted(single) if value != _IGNORED]
                classes = {_names_of(numbers[-1], is_ignored=255 in single): "numbers of classes"}
                raise self._refusal(
                    f"one value other than 0 in each mask, but not the same in all: {shown}",
                    {"threshold: 0": "each is the object"} | (classes if numbers[-1] <= 2 * len(numbers) else {}),
                )
        counts = {len(values) for values in held.values() if values and values == list(range(1, len(values) + 1))}
        is_numbered = all(values == list(range(1, len(values) + 1)) for values in held.values())
        if is_numbered and len(counts) > 2 and max(counts) > _OBJECTS:
            most = max(counts)
            names = f"names: [background, class-1, ..., class-{most}]"
            raise self._refusal(
                f"numbers 1 to n in each mask, n from {min(counts)} to {most}: numbers of objects, or of classes",
                {"threshold: 0": "every object is of one class", names: "numbers are of classes"},
            )

    def _refusal(self, what: str, settings: Mapping[str, str]) -> DataError:
        ways = [f'--mask-values "{setting}" ({meaning})' for setting, meaning in settings.items()]
        ways += ["write masks of two values, or of the numbers 0, 1, 2, ... of classes (255: of none)"]
        return DataError(f"{self.place}: masks have {what}; {', or '.join(ways)}")


def _values_of(data: bytes) -> MaskFacts:
    with opened_image(data) as image:
        colours: dict[int | str, frozenset[tuple[int, ...]]] = {}
        is_deep = image.mode.startswith(("I", "F")) and len(np.unique(np.asarray(image))) > 2
        is_clear = bool(image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255)
        if image.mode == "P":
            palette = np.asarray(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
            used = [number for number in np.unique(np.asarray(image)).tolist() if number < len(palette)]
            named = {number: tuple(palette[number].tolist()) for number in used}
            if any(len({*colour}) > 1 for colour in named.values()):
                colours = {number: frozenset([colour]) for number, colour in named.items()}
        elif image.mode not in ("1", "L", "LA") and not image.mode.startswith(("I", "F")):
            channels = np.asarray(image.convert("RGB")).reshape(-1, 3)
            if (channels != channels[:, :1]).any():
                colours = {"": frozenset(map(tuple, np.unique(channels, axis=0)[: _SHOWN + 1].tolist()))}
    try:
        numbers = mask_levels(data, "numbers")
    except ValueError:
        numbers = None
    return MaskFacts(mask_levels(data, "nearest"), numbers, colours, is_clear, is_deep and numbers is None)


def _names_of(last: int, *, is_ignored: bool) -> str:
    """Settings for masks of numbers up to the last; with two names alone a threshold would separate them."""
    names = ["background", *(f"class-{number}" for number in range(1, max(last, 2) + 1))]
    return f"names: [{', '.join(names)}]{', ignore: 255' if is_ignored else ''}"


def _used(facts: MaskFacts) -> list[int]:
    """Values of a mask except 0."""
    return [value for value in np.flatnonzero(facts.grey if facts.numbers is None else facts.numbers).tolist() if value]


def _same_aspect(one: tuple[int, int], other: tuple[int, int]) -> bool:
    first, second = one[0] / one[1], other[0] / other[1]
    return abs(first - second) <= _ASPECT * max(first, second) or one == other


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")


# ---- classes and groups


def nearly_equal_classes(tables: Tables, column: str) -> list[list[tuple[str, int]]]:
    """Classes whose names differ only in case, blanks, Unicode form or writing of a number, with their counts."""
    if not all(is_text(table.type_of(column)) for table in tables.values()):
        return []
    names = Counter[str]()
    for table in tables.values():
        names.update(name for name in table.read(column).to_pylist() if name)
    return [[(name, names[name]) for name in group] for group in spellings(names.elements()).values() if len(group) > 1]


_GROUP = re.compile(
    r"(^|[\W_])(ids?|nr|no|number|patients?|subjects?|persons?|people|cases?|stud(y|ies)|users?|authors?|speakers?|"
    r"sessions?|visits?|mrn|participants?|groups?|sites?|hospitals?|clinics?|scanners?|series|families|family|fall|"
    r"(fall|patienten?|akten?|proben?)?(nr|nummer|kennung)|proband(en)?|patienten?|klinik|paciente|dossier|sujet)([\W_]|$)|"
    r"[a-z](Id|ID)$",
    re.IGNORECASE,
)


_CODE = r"^[^\s\d]*[A-Za-z]\S*\d\S*$"


def repeating_ids(tables: Tables, taken: Callable[[str], bool]) -> list[tuple[str, int, int]]:
    """Columns that look like ids and repeat, with their distinct values and rows, without those ``taken``."""
    train, repeating = next(iter(tables.values())), []
    for entry in train.schema:
        if taken(entry.name) or not (is_text(entry.type) or pa.types.is_integer(entry.type)):
            continue
        values = pa.chunked_array(
            [chunk for table in tables.values() for chunk in table.read(entry.name).cast(pa.string()).chunks]
        ).drop_null()
        different = len(values.unique())
        named = _GROUP.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", entry.name)) is not None
        coded = is_text(entry.type) and pc.all(pc.match_substring_regex(values, _CODE)).as_py()
        if 1 < different < len(values) and (named or (coded and 20 * different > len(values))):
            repeating.append((entry.name, different, len(values)))
    return repeating


def in_two_splits(tables: Tables, column: str) -> list[str]:
    """Values of a column that occur in several splits."""
    counts = Counter(value for table in tables.values() for value in {*table.read(column).to_pylist()} - {None})
    return sorted(str(value) for value, count in counts.items() if count > 1)
