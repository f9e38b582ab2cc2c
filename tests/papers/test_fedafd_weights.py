from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from papers.fedafd.weights import ChannelWeights, Weights, channels_of

from polyfed.core.errors import RunError
from polyfed.runs.opened import open_run


def channel(values: list[list[float]], kinds: tuple[str, ...] = ("uni-modal", "multi-modal")) -> ChannelWeights:
    return ChannelWeights("sound", 3, tuple(f"c{k}" for k in range(len(values))), kinds, np.array(values), (0,))


def test_shares_by_hand() -> None:
    result = channel([[0.8, 0.5], [0.1, 0.5], [0.1, 0.0]], ("uni-modal", "multi-modal", "multi-modal"))
    uni, multi = result.shares()["uni-modal"], result.shares()["multi-modal"]
    assert (uni["clients"], multi["clients"]) == (1, 2)
    assert (uni["mean"], multi["mean"]) == pytest.approx((0.65, 0.175))
    assert (uni["relative"], multi["relative"]) == pytest.approx((1.95, 0.525))
    assert (uni["total"], multi["total"]) == pytest.approx((0.65, 0.35))
    assert uni["leading"] + multi["leading"] == pytest.approx(1)
    assert result.effective == pytest.approx((1 / 0.66 + 2) / 2)


def test_the_effective_number_goes_from_one_to_all() -> None:
    assert channel([[1.0, 0.0], [0.0, 1.0]]).effective == pytest.approx(1)
    assert channel([[0.5, 0.5], [0.5, 0.5]]).effective == pytest.approx(2)
    one = channel([[1.0, 1.0]], ("uni-modal",))
    assert (one.effective, one.shares()["uni-modal"]["relative"]) == (1.0, 1.0)


def test_samples_without_a_contribution_do_not_count() -> None:
    result, without = channel([[0.7, 0.0], [0.3, 0.0]]), channel([[0.7], [0.3]])
    assert (result.effective, result.shares()) == (without.effective, without.shares())
    nothing = channel([[0.0], [0.0]])
    assert math.isnan(nothing.effective)
    assert math.isnan(nothing.shares()["uni-modal"]["mean"])


def test_weights_of_a_run(fedafd_run: Path) -> None:
    result = Weights().answer(open_run(fedafd_run))
    image, text = channels_of(open_run(fedafd_run))
    assert (image.channel, image.round, image.clients) == ("image", 1, ("paired-0", "paired-1", "image"))
    assert image.kinds == ("multi-modal", "multi-modal", "uni-modal")
    assert set(text.kinds) == {"multi-modal"}
    stored = safetensors.numpy.load_file(fedafd_run / "arrays" / "weights.image" / "round-0001.safetensors")["values"]
    np.testing.assert_array_equal(image.values, stored.astype(np.float64))
    assert len(image.chosen) == 7
    assert channels_of(open_run(fedafd_run))[0].chosen == image.chosen
    assert image.to_json()["values"] == image.values[:, image.chosen].tolist()
    json.dumps(result.figures, allow_nan=False)


def test_a_drawing_and_a_table(fedafd_run: Path) -> None:
    result = Weights(samples=3).answer(open_run(fedafd_run))
    map_axes = result.draw().axes[0]
    shown = map_axes.images[0].get_array()
    np.testing.assert_array_equal(shown, np.array(result.figures["channels"]["image"]["values"]))
    assert len(map_axes.texts) == 9
    assert len(Weights(samples=50).answer(open_run(fedafd_run)).draw().axes[0].texts) == 0
    names = [row[0] for row in result.tables[0].rows]
    assert names == ["multi-modal (2)", "uni-modal (1)", "paired-0", "paired-1", "image"]


def test_a_damaged_file(fedafd_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fedafd_run, tmp_path / "copy"))
    (folder / "arrays" / "weights.text" / "round-0001.safetensors").write_bytes(b"no")
    with pytest.raises(RunError, match="is damaged"):
        Weights().answer(open_run(folder))
