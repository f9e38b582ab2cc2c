"""Augmentations of image batches, each against a slow version or a hand-worked case."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.randomness import generator
from polyfed.data import images
from polyfed.data.images import Augment, Augmentation, Erase, Flip, RandomCrop, Rotation, Shift, normalised

ALL = [
    Rotation(),
    Rotation(degrees=90),
    RandomCrop(),
    Shift(),
    Flip(),
    Erase(p=1),
]


def batch(b: int = 6, h: int = 12, w: int = 16) -> Tensor:
    return torch.randint(0, 256, (b, 3, h, w), dtype=torch.uint8, generator=generator("images"))


@pytest.mark.parametrize("augmentation", ALL, ids=lambda a: type(a).__name__)
class TestEvery:
    def test_keeps_shape_type_and_input(self, augmentation: Augmentation) -> None:
        for x in (batch(), batch().float(), batch(0), batch(1)):
            before = x.clone()
            y = augmentation(x, generator(1))
            assert y.shape == x.shape
            assert y.dtype == x.dtype
            assert torch.equal(x, before)

    def test_depends_on_its_generator_alone(self, augmentation: Augmentation) -> None:
        first = augmentation(batch(), generator(1))
        state = torch.get_rng_state()
        assert torch.equal(first, augmentation(batch(), generator(1)))
        assert torch.equal(state, torch.get_rng_state())
        assert not torch.equal(first, augmentation(batch(), generator(2)))

    def test_every_picture_has_a_draw_of_its_own(self, augmentation: Augmentation) -> None:
        same = batch(1).expand(32, -1, -1, -1).contiguous()
        assert len(augmentation(same, generator(1)).flatten(1).unique(dim=0)) > 1

    def test_pixels_stay_within_bounds(self, augmentation: Augmentation) -> None:
        y = augmentation(batch().float(), generator(1))
        assert y.min() >= 0
        assert y.max() <= 255.001


@pytest.mark.parametrize(
    "augmentation",
    [
        Rotation(degrees=0),
        RandomCrop(scale=(1, 1), ratio=(4 / 3, 4 / 3)),
        Shift(pixels=0),
        Flip(p=0),
        Erase(p=0),
    ],
    ids=lambda a: type(a).__name__,
)
def test_no_strength_is_no_change(augmentation: Augmentation) -> None:
    assert torch.equal(augmentation(batch(), generator(1)), batch())


def test_flip_mirrors_whole_pictures() -> None:
    x = batch(40)
    y = Flip()(x, generator(1))
    kept, mirrored = (y == x).flatten(1).all(1), (y == x.flip(3)).flatten(1).all(1)
    assert (kept ^ mirrored).all()
    assert 10 < int(mirrored.sum()) < 30
    assert torch.equal(Flip(p=1)(x, generator(1)), x.flip(3))


def test_shift_equals_a_loop_over_pixels() -> None:
    x, y = batch(), Shift(pixels=3)(batch(), generator(1))
    down, right = torch.randint(7, (2, len(x)), generator=generator(1)) - 3
    slow = torch.zeros_like(x)
    for i in range(len(x)):
        for row in range(12):
            for column in range(16):
                source = row + int(down[i]), column + int(right[i])
                if 0 <= source[0] < 12 and 0 <= source[1] < 16:
                    slow[i, :, row, column] = x[i, :, source[0], source[1]]
    assert torch.equal(y, slow)


def test_boxes_keep_area_shape_and_bounds() -> None:
    boxes = images.crop_boxes(2000, (200, 300), (0.1, 0.6), (0.5, 2.0), generator(1)).double()
    top, left, h, w = boxes.unbind(1)
    share = h * w / (200 * 300)
    assert (share > 0.098).all()
    assert (share < 0.61).all()
    assert ((w / h > 0.49) & (w / h < 2.03)).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h).max() == 200
    assert (left + w).max() == 300
    assert (top == 0).any(), "every place is possible"


def test_box_that_never_fits() -> None:
    assert not images.crop_boxes(5, (10, 10), (1.0, 1.0), (3.0, 3.0), generator(1))[:, 2:].any()
    impossible = RandomCrop(scale=(1, 1), ratio=(3, 3))
    assert torch.equal(impossible(batch(), generator(1)), batch())
    assert torch.equal(Erase(p=1, scale=(1, 1), ratio=(3, 3))(batch(), generator(1)), batch())


def test_crop_of_a_ramp_is_a_slower_ramp() -> None:
    h, w = 12, 16
    ramp = torch.arange(w).float().expand(5, 3, h, w).contiguous()
    y = RandomCrop(scale=(0.3, 0.6))(ramp, generator(1))
    boxes = images.crop_boxes(5, (h, w), (0.3, 0.6), (0.75, 4 / 3), generator(1))
    for picture, (_, left, _, width) in zip(y, boxes.tolist(), strict=True):
        for column in range(w):
            place = min(max((column + 0.5) * width / w - 0.5, 0), width - 1)
            assert picture[0, 0, column].item() == pytest.approx(left + place, abs=1e-4)


def test_rotation_equals_a_loop_over_pixels() -> None:
    x = batch(3).float()
    y = Rotation(degrees=40)(x, generator(1))
    angles = (torch.rand(3, generator=generator(1)) * 2 - 1) * math.radians(40)
    h, w = 12, 16
    for i, angle in enumerate(angles.tolist()):
        for row in range(h):
            for column in range(w):
                dy, dx = row - (h - 1) / 2, column - (w - 1) / 2
                sy = math.sin(angle) * dx + math.cos(angle) * dy + (h - 1) / 2
                sx = math.cos(angle) * dx - math.sin(angle) * dy + (w - 1) / 2
                if min(sy % 1 - 0.5, sx % 1 - 0.5, key=abs) ** 2 < 1e-8:
                    continue  # exactly between two pixels
                inside = -0.5 < sy < h - 0.5 and -0.5 < sx < w - 0.5
                expected = x[i, :, round(sy), round(sx)] if inside else torch.zeros(3)
                assert torch.equal(y[i, :, row, column], expected)


@pytest.mark.parametrize("resampling", ["nearest", "bilinear"])
def test_quarter_turn_is_exact(resampling: str) -> None:
    x = batch(2, 8, 8).float()
    grid = images.turned_grid(torch.tensor([math.pi / 2, -math.pi / 2]), 8, 8)
    y = F.grid_sample(x, grid, resampling, align_corners=False)
    expected = torch.stack([x[0].rot90(1, (1, 2)), x[1].rot90(-1, (1, 2))])
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=0)


def test_erase_cuts_one_box_out_of_some() -> None:
    x = torch.ones(400, 3, 20, 20)
    y = Erase(p=0.3)(x, generator(1))
    holes = y[:, 0] == 0
    assert torch.equal(y, (~holes).float().unsqueeze(1).expand_as(y)), "all channels alike, 0 or unchanged"
    hit = holes.flatten(1).any(1)
    assert 80 < int(hit.sum()) < 160
    for hole in holes[hit]:
        rows, columns = hole.any(1), hole.any(0)
        assert torch.equal(hole, rows[:, None] & columns[None, :])
        assert int(rows.sum()) == int(rows.nonzero().max() - rows.nonzero().min()) + 1
        assert int(columns.sum()) == int(columns.nonzero().max() - columns.nonzero().min()) + 1
        assert 0.01 < float(hole.float().mean()) < 0.36


@pytest.mark.parametrize("name", ["half", "imagenet", "cifar100"])
def test_normalised_equals_the_formula(name: str) -> None:
    x = batch()
    y = normalised(x, name)
    mean, std = images.MEAN_STD[name]
    for channel in range(3):
        expected = (x[:, channel].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(y[:, channel].double(), expected, atol=1e-5, rtol=0)
    assert y.dtype == torch.float32


def test_short_forms() -> None:
    settings = Augment.model_validate({"rotate": 15, "crop": 0.4, "shift": 2, "flip": True, "erase": 0.3})
    assert settings == Augment(
        rotate=Rotation(degrees=15),
        crop=RandomCrop(scale=(0.4, 1)),
        shift=Shift(pixels=2),
        flip=Flip(),
        erase=Erase(p=0.3),
    )
    assert Augment.model_validate({"flip": False, "crop": None}).flip is None
    assert Augment.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": {"scale": (0.9, 0.1)}}, "needs 0 < least <= greatest, not 0.9 and 0.1"),
        ({"erase": 1.5}, "less than or equal to 1"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Augment.model_validate(settings)


def test_order_of_changes() -> None:
    augment = Augment(shift=Shift(pixels=2), flip=Flip(p=1), erase=Erase(p=1))
    g, h = generator(1), generator(1)
    y = augment.moved(batch(), g)
    assert torch.equal(y, Shift(pixels=2)(batch(), h).flip(3))
    assert torch.equal(augment.normalised(y.float(), generator(2)), Erase(p=1)(y.float(), generator(2)))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (".heic", "magick mogrify -format png *.heic"),
        ("scan.NII.gz", "med2image -i 1.nii.gz "),
        (".gz", "unpack it"),
        (".dcm", "dcmj2pnm --write-png"),
        (".mp3", "ffmpeg -i 1.mp3 1.wav"),
        ("without ending", "convert it to .png"),
    ],
)
def test_a_file_that_is_not_read_has_a_command_that_converts_it(name: str, command: str) -> None:
    assert command in images.remedy_of(name)
