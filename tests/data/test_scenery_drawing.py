import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from polyfed.data.scenery.drawing import STYLES, TONES, inside, picture, png, shifted
from polyfed.data.scenery.layout import Scene, SceneRecipe, Thing, arrange

EASY = SceneRecipe(0, "train", 1, difficulty=0.0)
ONE = Scene((Thing("square", "red", "plain", "large", 0.25),), (0,))


def grid(n: int = 201) -> tuple[np.ndarray, np.ndarray]:
    line = np.linspace(-1, 1, n, dtype=np.float32)
    return np.meshgrid(line, line)


def area(points: np.ndarray) -> float:
    return float(points.mean()) * 4


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("circle", math.pi * 0.85),
        ("ring", math.pi * 0.65),
        ("square", 1.44**2),
        ("triangle", 3 * math.sqrt(3) / 4),
        ("cross", 2 * 0.6 * 1.84 - 0.6**2),
        # ten triangles between the centre, a tip at 1 and a notch at 0.45, 36 degrees apart
        ("star", 10 * 0.5 * 0.45 * math.sin(math.pi / 5)),
    ],
)
def test_shapes_have_the_area_of_the_formula(shape: str, expected: float):
    assert area(inside(shape, *grid())) == pytest.approx(expected, rel=0.03)


def test_the_mask_is_the_main_thing_and_the_picture_has_its_colour():
    pixels, mask = picture(ONE, EASY, 0)
    assert pixels.shape == (64, 64, 3)
    assert mask.shape == (64, 64)
    assert set(np.unique(mask)) == {0, 255}
    assert (mask > 0).mean() == pytest.approx(1.44**2 * 0.25**2, rel=0.1)
    mean = pixels[mask > 0].mean(axis=0) / 255
    assert mean == pytest.approx(TONES["red"], abs=0.15)


@pytest.mark.parametrize("colour", TONES)
def test_the_nearest_tone_is_the_named_one(colour: str):
    scene = Scene((replace(ONE.things[0], colour=colour),), (0,))
    pixels, mask = picture(scene, EASY, 5)
    mean = pixels[mask > 0].mean(axis=0) / 255
    # light differs from scene to scene: compare directions
    cosine = {name: mean @ np.array(tone) / np.linalg.norm(mean) / np.linalg.norm(tone) for name, tone in TONES.items()}
    assert max(cosine, key=cosine.__getitem__) == colour


def test_what_lies_in_front_is_taken_out_of_the_mask():
    front = Thing("square", "blue", "plain", "medium", 0.2, x=0.7)
    hidden = picture(Scene((*ONE.things, front), (0, 1)), EASY, 0)[1]
    free = picture(Scene((*ONE.things, front), (1, 0)), EASY, 0)[1]
    alone = picture(ONE, EASY, 0)[1]
    assert np.array_equal(free, alone)
    assert (hidden > 0).sum() < 0.9 * (alone > 0).sum()


@pytest.mark.parametrize("domain", STYLES)
@pytest.mark.parametrize("size", [16, 64, 97])
def test_every_domain_and_size_draws(domain: str, size: int):
    recipe = SceneRecipe(0, "train", 1, size=size, difficulty=1.0, domain=domain)  # type: ignore[arg-type]
    for index in range(4):
        pixels, mask = picture(arrange(recipe, index), recipe, index)
        assert pixels.shape == (size, size, 3)
        assert pixels.std() > 5
        assert mask.any()


def test_masks_do_not_depend_on_the_domain():
    masks = [picture(ONE, replace(EASY, domain=domain, shift=0.5), 0)[1] for domain in STYLES]
    assert all(np.array_equal(mask, masks[0]) for mask in masks)


def test_shift_grows_steadily_from_nothing():
    pixels = np.random.default_rng(0).random((8, 8, 3), dtype=np.float32)
    distances = [float(np.abs(shifted(pixels, shift) - pixels).mean()) for shift in (0.0, 0.3, 0.6, 1.0)]
    assert distances[0] == 0
    assert distances == sorted(distances)
    assert shifted(pixels, 1.0).std() < 0.6 * pixels.std()


def test_png_is_lossless_and_pictures_are_reproducible():
    pixels, mask = picture(ONE, EASY, 3)
    for values, mode in ((pixels, "RGB"), (mask, "L")):
        image = Image.open(io.BytesIO(png(values)))
        assert image.mode == mode
        assert np.array_equal(np.array(image), values)
    assert np.array_equal(picture(ONE, EASY, 3)[0], pixels)
    assert not np.array_equal(picture(ONE, EASY, 4)[0], pixels)
