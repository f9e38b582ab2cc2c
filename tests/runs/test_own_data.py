"""Data and modules of the running process: registered under a name, used in a federation, refused when others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ChainDataset, TensorDataset

import polyfed
from polyfed import Experiment, open_run, register_data, register_module, resume, run
from polyfed.core.errors import ConfigError, DataError, PolyfedError
from polyfed.data.sources.memory import Memory, registered_data
from polyfed.data.sources.stored import Arrow
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.encoders.registered import Registered
from small_federations import Config, bag, experiment, plain, resnet, words

COLOURS = ("red", "green", "blue")


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"image": Image.new("RGB", (12, 9), COLOURS[k % 3]), "caption": f"a {COLOURS[k % 3]} thing {k}", "label": k % 3}
        for k in range(start, start + count)
    ]


def splits() -> dict[str, Any]:
    return {"train": rows(24), "validation": rows(6, 24), "test": rows(6, 30)}


def federation(source: Config) -> Config:
    """A server that retrieves and two paired clients, one with an encoder of its own."""
    source = source | {"columns": {"image": "image", "text": "caption"}, "targets": {"label": "label"}}
    both = {"dim": 8, "encoders": {"image": resnet(), "text": bag(words(16, 200))}}
    common = {"source": "mine", "task": "retrieval", "training": plain(0.05, 8)}
    client = common | {"model": both, "count": 2}
    sections = {"public": {"source": "mine", "items": 8}, "server": common | {"model": both}}
    method = {"name": "creamfl", "local_epochs": 1}
    return experiment("own", {"mine": source}, method, rounds=1, **sections, clients={"paired": client})


def hugging_face() -> Any:
    features = datasets.Features(
        {"image": datasets.Image(), "caption": datasets.Value("string"), "label": datasets.ClassLabel(names=COLOURS)}
    )
    made = {split: datasets.Dataset.from_list(part, features=features) for split, part in splits().items()}
    return datasets.DatasetDict(made)


def frame() -> pd.DataFrame:
    return pd.DataFrame([row | {"split": split} for split, part in splits().items() for row in part])


def test_data_of_a_notebook_train_a_federation_and_the_run_goes_on_with_them(tiny: Config, tmp_path: Path) -> None:
    register_data("shop", hugging_face())
    first = run(Experiment.load(federation({"name": "memory", "data": "shop"})), tmp_path / "run")
    assert first.metrics()["gallery_image"] == 6
    again = resume(tmp_path / "run")
    assert again.metrics() == first.metrics()
    assert again.experiment.data.sources["mine"].digest == registered_data("shop").digest


def test_the_same_rows_give_the_same_image_from_any_source() -> None:
    opened = []
    for data in (splits(), frame(), hugging_face()):
        register_data("shop", data)
        source = Memory(data="shop", columns={"image": "image", "text": "caption"}, targets={"label": "label"})
        split = source.open("test", name="mine", data_dir=None)
        image = split.modality("image").values[0].as_py()["bytes"]
        opened.append((len(split), split.modality("text").texts(), split.read("label").values.to_pylist(), image[:8]))
    assert opened[0] == opened[1] == opened[2]


def test_other_data_under_the_name_are_refused_and_none_at_all_name_their_place(tmp_path: Path) -> None:
    register_data("shop", splits())
    source = Memory(data="shop", columns={"image": "image"})
    register_data("shop", splits() | {"test": rows(5)})
    with pytest.raises(DataError, match="differ from those of the experiment"):
        source.open("test", name="mine", data_dir=None)
    with pytest.raises(DataError, match=r"call polyfed.register_data\('shopp', ...\) with the data.*did you mean"):
        Memory(data="shopp").open("test", name="mine", data_dir=None)
    register_data("flat", rows(3))
    with pytest.raises(DataError, match="no split 'test'; valid: train"):
        Memory(data="flat").open("test", name="mine", data_dir=None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "of type int"),
        ([], "have no rows"),
        ({"train": rows(2), "tset": rows(1)}, "unknown split 'tset'; did you mean 'test'"),
        ([{"a": 1}, {"a": "x"}], "column 'a'"),
        ([{"a": Path("x.png")}, {"a": "x"}], "images and a value of type str"),
        (ChainDataset([]), "an IterableDataset has no length"),
        ([torch.zeros(3, 8, 8)], r"item 0 is of type Tensor \[3, 8, 8\]; give a pair"),
        ([(torch.zeros(5, 8, 8), 1)], r"item 0, x is float32 \[5, 8, 8\]; give images"),
        ([(torch.full((3, 8, 8), -1.5), 1)], r"x is float32 \[3, 8, 8\] with values from -1.5 to -1.5; give pixels"),
        ((torch.zeros(3, 3, 8, 8), torch.zeros(2)), "3 items, but 2 labels"),
    ],
)
def test_other_values_are_refused_when_registered(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        register_data("odd", data)


def test_data_sets_of_torch_pairs_and_tensors_are_the_same_data() -> None:
    pixels, labels = torch.rand(6, 3, 8, 9, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
    exact = (255 * pixels).round().byte()
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in exact]
    every: tuple[Any, ...] = (
        TensorDataset(pixels, labels),
        (exact, labels),
        [*zip(images, labels.tolist(), strict=True)],
        [(image.permute(1, 2, 0).numpy(), int(label)) for image, label in zip(pixels, labels, strict=True)],
        {"train": [{"image": image, "label": label} for image, label in zip(pixels, labels, strict=True)]},
    )
    digests = set()
    for data in every:
        register_data("torch", data)
        digests.add(registered_data("torch").digest)
    assert len(digests) == 1
    assert registered_data("torch").splits["train"].column("label").to_pylist() == labels.tolist()
    register_data("captions", [(pixels[0], ["one", "two"])])
    assert registered_data("captions").splits["train"].column_names == ["image", "text"]


def test_images_may_be_files_and_arrays(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    red = np.asarray(Image.new("RGB", (4, 4), "red"))
    register_data("files", [{"image": tmp_path / "a.png"}])
    register_data("arrays", [{"image": red}])
    pixels = []
    for name in ("files", "arrays"):
        column = Memory(data=name, columns={"image": "image"}).open("train", name="m", data_dir=None).modality("image")
        view = polyfed.data.views.pixels.Pixels(size=8)
        pixels.append(view.open(column, "image", DataContext(tmp_path / "cache"))(torch.tensor([0])))
    assert torch.equal(*pixels)


def test_saved_data_sets_and_files_of_arrow_load_as_they_are(tiny: Config, tmp_path: Path) -> None:
    data = hugging_face()
    data.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    for split, part in data.items():
        table = part.with_format("arrow")[:]
        pyarrow.feather.write_feather(table, tmp_path / "files" / f"{split}.feather", compression="zstd")
    with pa.OSFile(str(tmp_path / "one.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for path, split in (("saved", "test"), ("files", "test"), ("one.arrow", "train")):
        source = Arrow(path=path, columns={"image": "image", "text": "caption"}, targets={"label": "label"})
        opened = source.open(split, name="mine", data_dir=tmp_path)
        assert len(opened) == 6
        assert opened.classes["label"] == COLOURS
        assert opened.modality("text").texts()[0] == "a red thing 30"
    result = run(Experiment.load(federation({"name": "arrow", "path": str(tmp_path / "saved")})), tmp_path / "run")
    assert result.metrics()["gallery_image"] == 6


def test_other_folders_than_arrow_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.arrow").write_bytes(b"not arrow")
    with pytest.raises(DataError, match="neither a data set that save_to_disk wrote"):
        Arrow(path="empty").open("train", name="mine", data_dir=tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        Arrow(path="odd.arrow").open("train", name="mine", data_dir=tmp_path)
    with pytest.raises(DataError, match="no folder 'gone'"):
        Arrow(path="gone").open("train", name="mine", data_dir=tmp_path)


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_plain_module_is_a_clients_encoder(tiny: Config, tmp_path: Path) -> None:
    register_data("shop", splits())
    register_module("net", Net)
    content = federation({"name": "memory", "data": "shop"})
    own = {"name": "registered", "module": "net", "options": {"width": 7}, "view": {"name": "pixels", "size": 16}}
    encoders = content["clients"]["paired"]["model"]["encoders"] | {"image": own}
    content["clients"]["paired"]["model"] = {"dim": 8, "encoders": encoders}
    result = run(Experiment.load(content), tmp_path / "run")
    module = result.client_model("paired-0").encoders["image"]
    assert isinstance(module[0], Net)
    assert module[1].in_features == 7
    initial = result.federation.client_model(result.federation.members["paired-0"]).encoders["image"]
    assert not torch.equal(initial[0].layers[1].weight, module[0].layers[1].weight), "it was trained"


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_module_that_does_not_fit_is_refused() -> None:
    spec, context = InputSpec((3, 16, 16)), DataContext(Path())
    register_module("net", Net)
    register_module("ready", Net())
    register_module("map", nn.Conv2d(3, 4, 1))
    register_module("narrow", nn.Linear(4, 4))
    assert isinstance(Registered(module="ready").build(5, spec, context), Net)
    for module, options, message in (
        ("nett", {}, "no module is registered as 'nett'.*did you mean 'net'"),
        ("net", {"wide": 3}, "cannot be made with options"),
        ("ready", {"width": 3}, "takes no options"),
        ("map", {}, r"gives \[2, 4, 16, 16\]"),
        ("narrow", {}, r"fails on its view's input \[2, 3, 16, 16\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            Registered(module=module, options=options).build(8, spec, context)
    with pytest.raises(ConfigError, match="is a int"):
        register_module("odd", 3)  # type: ignore[arg-type]


def test_a_run_without_its_data_still_opens(tiny: Config, tmp_path: Path) -> None:
    register_data("brief", splits())
    run(Experiment.load(federation({"name": "memory", "data": "brief"})), tmp_path / "run")
    register_data("brief", splits() | {"train": rows(23)})
    assert open_run(tmp_path / "run").metrics()["gallery_image"] == 6
    with pytest.raises(PolyfedError, match="differ from those"):
        resume(tmp_path / "run")
