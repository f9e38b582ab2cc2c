"""Folders as people have them, each with what makes it odd."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from polyfed.data.sounds import wav

Make = Callable[[Path], None]


def image(path: Path, seed: int, size: tuple[int, int] = (16, 12), orientation: int = 1) -> Path:
    """A noisy image; of JPEGs with a mark of EXIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8))
    exif = picture.getexif()
    exif[0x0112] = orientation
    picture.save(path, **({"exif": exif} if orientation != 1 else {}))
    return path


def pictures(folder: Path, *names: str) -> Path:
    """The folder, with noisy images of these names."""
    for number, name in enumerate(names):
        image(folder / name, number, (8, 8))
    return folder


def classes(top: Path) -> None:
    """Class folders, with what a NAS, a Mac and a scanner put next to them."""
    for number in range(40):
        image(top / "ab"[number % 2] / f"{number}.png", number)
    image(top / "@eaDir" / "0.png" / "thumb.jpg", 1)
    image(top / "a" / "@eaDir" / "thumb.jpg", 2)
    (top / "Thumbs.db").write_bytes(b"x")
    (top / ".DS_Store").write_bytes(b"x")
    (top / ".cache" / "deep").mkdir(parents=True)
    (top / ".cache" / "deep" / "file").write_bytes(b"x")
    (top / "b" / "scan.dcm").write_bytes(b"x")


def captions(top: Path) -> None:
    """Captions, of which some name images that are not there, and images without any."""
    for number in range(30):
        image(top / "images" / f"{number}.jpg", number)
    lines = [f"images/{k}.jpg,a thing of kind {k % 5},patient-{k // 3}" for k in range(1, 40)]
    (top / "captions.csv").write_text("\n".join(["file_name,caption,patient_id", *lines, lines[0]]))


def beside(top: Path) -> None:
    """Files of captions next to images, one without an image."""
    for number in range(30):
        image(top / f"{number}.jpg", 500 + number)
        (top / f"{number}.txt").write_text(f"a thing {number}\nand its colour\n")
    (top / "note.txt").write_text("who took these")


def texts(top: Path) -> None:
    """Texts whose telling word is the 60th, some without a label, with a column of codes."""
    rows = []
    for number in range(60):
        text = " ".join([*["word"] * 59, ("sport", "politics")[number % 2], "end"])
        rows.append(f"{text},{'sp'[number % 2] if number else ''},c{number % 9}")
    top.mkdir(parents=True, exist_ok=True)
    (top / "news.csv").write_text("\n".join(["text,label,code", *rows]))


def two_splits(top: Path) -> None:
    """Folders of train and val without test, with equal files in both."""
    for number in range(60):
        part = "val2017" if number >= 48 else "train2017"
        image(top / part / "ab"[number % 2] / f"{number}.png", number % 48)


def sounds(top: Path) -> None:
    """Recordings of up to two seconds."""
    for number in range(24):
        path = top / ("hum", "beep")[number % 2] / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wav(np.sin(np.arange(8000 + 350 * number) / (number % 2 + 1)).astype(np.float32), 8000))


def nearly_equal(top: Path) -> None:
    """Class names that differ in case, blanks and Unicode form."""
    names = ["Café", "cafe\u0301 ", "dog", "Dog", "DOG"]
    rows = [f"text number {number},{names[number % 5]}" for number in range(50)]
    top.mkdir(parents=True, exist_ok=True)
    (top / "news.csv").write_text("\n".join(["text,label", *rows]), "utf-8")


def languages(top: Path) -> None:
    """Texts of which half are German."""
    both = ["der Hund ist auf dem Dach und die Katze mit", "the dog is on the roof and a cat with it"]
    rows = [f"{both[number % 2]} {number},{'ab'[number // 2 % 2]}" for number in range(60)]
    top.mkdir(parents=True, exist_ok=True)
    (top / "news.csv").write_text("\n".join(["text,label", *rows]), "utf-8")


def masked(
    draw: Callable[[int], Image.Image], size: tuple[int, int] = (16, 12), orientation: int = 1, first: int = 0
) -> Make:
    """Images, of which one counts from ``first``, with masks that are drawn by their number."""

    def make(top: Path) -> None:
        for number in range(24):
            ending = "jpg" if orientation != 1 else "png"
            image(top / "images" / f"{number}.{ending}", first + number, size, orientation)
            (top / "masks").mkdir(parents=True, exist_ok=True)
            draw(number).save(top / "masks" / f"{number}.png")

    return make


def grey(*values: int, size: tuple[int, int] = (16, 12)) -> Image.Image:
    """A mask with a bar of each value."""
    pixels = np.zeros((size[1], size[0]), np.uint8)
    for place, value in enumerate(values):
        pixels[:, 1 + place : 2 + place] = value
    return Image.fromarray(pixels)


def palette(number: int, colour: tuple[int, int, int]) -> Image.Image:
    """A mask of a palette, with one number of a colour."""
    mask = Image.fromarray(np.asarray(grey(number)), "P")
    colours = [0] * 768
    colours[3 * number : 3 * number + 3] = colour
    mask.putpalette(colours)
    return mask


def depths(top: Path) -> None:
    """Images of 8 and of 16 bits, narrow and wide, in class folders."""
    for number in range(40):
        path = image(top / "ab"[number % 2] / f"{number}.png", number, (40 if number % 3 else 8, 12))
        if number % 4 == 0:
            Image.fromarray(np.full((12, 8), 4000 + number, np.uint16)).save(path)


FOLDERS: Mapping[str, tuple[str, Make, str]] = {
    "classes": ("pictures", classes, ""),
    "captions": ("pairs", captions, ""),
    "beside": ("pairs", beside, ""),
    "texts": ("texts", texts, "news.csv"),
    "two splits": ("pictures", two_splits, ""),
    "sounds": ("sounds", sounds, ""),
    "languages": ("texts", languages, "news.csv"),
    "depths": ("pictures", depths, ""),
    "masks": ("masks", masked(lambda number: grey(255)), ""),
}
"""Folders that can be read -> kind of data, what makes them, and the file that is given, if not the folder."""


def files_in(top: Path) -> int:
    """Number of files below a folder, hidden ones included."""
    return sum(len(names) for _, _, names in os.walk(top))
