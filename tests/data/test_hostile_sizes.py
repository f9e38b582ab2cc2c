"""Files that ask for more than they are: one line by name, within a limit of memory, and no process that dies."""

import os
import re
import resource
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from item_tables import column_of
from polyfed.core.errors import DataError
from polyfed.data.sources.arrow import Arrow
from polyfed.data.sources.parquet import Parquet
from polyfed.data.text_files import regular_bytes
from polyfed.data.view import DataContext
from polyfed.data.views.mel import Mel
from polyfed.reporting.gallery import gallery_entry
from small_federations import topics

Make = Callable[[Path], object]
TEXTS = [f"text {number:03}" for number in range(100)]
WHERE = {"columns": {"text": "text"}, "targets": {"label": "label"}}


def ipc(values: pa.Array, how: Any = pa.ipc.new_file, **options: Any) -> bytes:
    table, sink = (
        pa.table({"text": values, "label": [place % 2 for place in range(len(values))]}),
        pa.BufferOutputStream(),
    )
    with how(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def with_number(data: bytes, old: int, new: int, place: int, count: int = 101) -> bytes:
    """The file with another number in the place of one of its offsets or indices, all of which are ``old`` apart."""
    run = struct.pack(f"<{count}i", *(old * number for number in range(count)))
    start = data.index(run) + 4 * place
    return data[:start] + struct.pack("<i", new) + data[start + 4 :]


def damaged_saved(folder: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1] * 50}).save_to_disk(str(folder))
    (file,) = folder.glob("*.arrow")
    file.write_bytes(with_number(file.read_bytes(), 8, 2**31 - 1, 50))


def arrow(data: Callable[[], bytes]) -> Make:
    return lambda folder: (folder / "train.arrow").write_bytes(data())


def indices() -> bytes:
    words = pa.DictionaryArray.from_arrays(pa.array(range(101), pa.int32()), pa.array([f"w{k}" for k in range(101)]))
    return with_number(ipc(words), 1, 5_000, 50)


def parquet(values: Callable[[], pa.Array], **options: Any) -> Make:
    def make(folder: Path) -> None:
        column = values()
        labels = pa.array(np.arange(len(column), dtype=np.int8) % 2)
        table = pa.table({"text": column, "label": labels})
        pq.write_table(table, folder / "train.parquet", compression="zstd", store_schema=False, **options)

    return make


def equal_texts(count: int, length: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), ["x" * length])


def one_list() -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, 200_000_000], pa.int32()), pa.array(np.zeros(200_000_000, np.int8)))


HOSTILE: dict[str, tuple[str, Make, str]] = {
    "offset in the middle": (
        "arrow",
        arrow(lambda: with_number(ipc(pa.array(TEXTS)), 8, 2**31 - 1, 50)),
        r"train\.arrow'",
    ),
    "offset too far": (
        "arrow",
        arrow(lambda: with_number(ipc(pa.array(TEXTS)), 8, 4_000, 50)),
        r"train\.arrow': damaged",
    ),
    "last offset": (
        "arrow",
        arrow(lambda: with_number(ipc(pa.array(TEXTS)), 8, 4_000, 100)),
        r"train\.arrow': damaged",
    ),
    "negative offset": (
        "arrow",
        arrow(lambda: with_number(ipc(pa.array(TEXTS)), 8, -8, 50)),
        r"train\.arrow': damaged",
    ),
    "stream": (
        "arrow",
        arrow(lambda: with_number(ipc(pa.array(TEXTS), pa.ipc.new_stream), 8, 2**31 - 1, 50)),
        r"train\.arrow': damaged",
    ),
    "no UTF-8": ("arrow", arrow(lambda: ipc(pa.array(TEXTS)).replace(b"text 050", b"text \xff50")), "damaged .*UTF8"),
    "index of a dictionary": ("arrow", arrow(indices), r"train\.arrow': damaged"),
    "saved data set": ("arrow", damaged_saved, "cannot read '.*'"),
    "packed Arrow": (
        "arrow",
        arrow(lambda: ipc(pa.array(["x" * 20_000_000] * 60), compression="zstd")),
        r"train\.arrow': 1,2.* bytes in memory or more, the limit is 1,073,741,824 \(max_bytes of the source\)",
    ),
    "rows": (
        "parquet",
        parquet(lambda: equal_texts(20_000_000, 90)),
        "20,000,000 rows, the limit is 10,000,000; raise max_",
    ),
    "long texts": (
        "parquet",
        parquet(lambda: equal_texts(5_000, 1_000_000)),
        "bytes in memory or more, the limit is 1,073",
    ),
    "longer texts": (
        "parquet",
        parquet(lambda: equal_texts(300, 9_000_000), dictionary_pagesize_limit=1 << 30),
        "bytes in memory or more, the limit is 1,073",
    ),
    "one list": ("parquet", parquet(one_list), "1,600,000,000 bytes in memory or more"),
}
QUICK = [case for case in HOSTILE if case not in ("packed Arrow", "rows", "long texts", "longer texts", "one list")]

READ = """
import sys
from polyfed.core.errors import DataError
from polyfed.data.sources.arrow import Arrow
from polyfed.data.sources.parquet import Parquet
from pathlib import Path
kind, folder = {"arrow": Arrow, "parquet": Parquet}[sys.argv[1]], Path(sys.argv[2])
try:
    source = kind(path=".", columns={"text": "text"}, targets={"label": "label"})
    split = source.open("train", name="mine", data_dir=folder)
    print(split.modality("text").values.to_pylist()[:2])
except DataError as error:
    print("refused:", error)
"""


def limited(code: str, *arguments: object, gigabytes: int = 4) -> subprocess.CompletedProcess[str]:
    """Another process, which may take so much address space, as in ``ulimit -v``."""
    most = gigabytes << 30
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
        check=False,
    )


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in HOSTILE if case not in QUICK)]
)
def test_a_hostile_table_gives_one_line(tmp_path: Path, case: str) -> None:
    kind, make, message = HOSTILE[case]
    make(tmp_path)
    ended = limited(READ, kind, tmp_path)
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-500:])
    assert ended.stdout.startswith("refused: ")
    assert ended.stdout.count("\n") == 1
    assert re.search(message, ended.stdout), ended.stdout


def experiment(folder: Path, kind: str) -> Path:
    config = topics(name="fedavg")
    source = {"name": kind, "path": ".", "targets": {"topic": "label"}, "columns": {"text": "text"}}
    config["data"]["sources"]["texts"] = source | {"splits": {"test": ["train"] if kind == "parquet" else "train"}}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))
    return folder / "experiment.yaml"


MAIN = "import sys; from polyfed.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--dry-run",), ("--out", "run")], ids=" ".join)
@pytest.mark.parametrize("case", HOSTILE)
def test_commands_give_one_line(tmp_path: Path, case: str, options: tuple[str, ...]) -> None:
    kind, make, _ = HOSTILE[case]
    make(tmp_path)
    file = experiment(tmp_path, kind)
    options = tuple(str(tmp_path / "run") if option == "run" else option for option in options)
    ended = limited(MAIN, "run", file, "--data-dir", tmp_path, *options, gigabytes=8)
    assert ended.returncode == 2, (ended.returncode, ended.stderr[-2000:])
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("rror") == 1


@pytest.mark.parametrize("command", [("prepare", "{}", "{}-out"), ("init", "{}.yaml", "--pairs", "{}")], ids=" ".join)
def test_a_small_table_of_captions_takes_little_memory(tmp_path: Path, command: tuple[str, ...]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    lines = ["file_name,caption"]
    for number in range(20):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
        lines.append(f"{number}.png,picture {number}")
    (folder / "captions.csv").write_text("\n".join(lines))
    ended = limited(MAIN, *(part.replace("{}", str(folder)) for part in command))
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("1234")
    assert regular_bytes(tmp_path / "a.csv", tmp_path, 4) == b"1234"
    before = os.stat_result((stat.S_IFREG, *[0] * 5, 3, 0, 0, 0))
    monkeypatch.setattr("os.fstat", lambda descriptor: before)
    with pytest.raises(ValueError, match="3 bytes that holds more"):
        regular_bytes(tmp_path / "a.csv", tmp_path, 4)


def recording(rate: int, samples: int = 100) -> bytes:
    """WAV of 8 bits."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate, 1, 8)
    return (
        b"RIFF"
        + struct.pack("<I", 36 + samples)
        + b"WAVE"
        + form
        + struct.pack("<4sI", b"data", samples)
        + bytes(samples)
    )


@pytest.mark.parametrize("rate", [0, 1_000_001, 99_999_989, 2_147_483_629, 2**32 - 1])
def test_a_recording_of_an_unheard_rate_is_refused_before_it_is_resampled(tmp_path: Path, rate: int) -> None:
    inputs = Mel().open(column_of([recording(rate)]), "sound", DataContext(cache=tmp_path, ahead=False))
    with pytest.raises(DataError, match=rf"row 0.*100 samples at {rate:,} a second, which may be 1 to 1,000,000"):
        inputs(torch.tensor([0]))
    with pytest.raises(ValueError, match="which may be 1 to 1,000,000"):
        gallery_entry(recording(rate), playable=True)


def test_a_recording_that_would_be_of_days_is_refused() -> None:
    with pytest.raises(ValueError, match=r"800,000,000 samples at 8,000 a second, the limit is 268,435,456"):
        gallery_entry(recording(1, 100_000))
    assert gallery_entry(recording(1_000_000)).picture


@pytest.mark.parametrize("kind", [Parquet, Arrow])
def test_limits_of_tables_are_settings(tmp_path: Path, kind: Any) -> None:
    parquet(lambda: pa.array(TEXTS))(tmp_path)
    arrow(lambda: ipc(pa.array(TEXTS)))(tmp_path)

    def texts(**settings: int) -> list[str]:
        return (
            kind(path=".", **settings, **WHERE).open("train", name="mine", data_dir=tmp_path).modality("text").texts()
        )

    assert texts(max_rows=100, max_bytes=10_000) == TEXTS
    with pytest.raises(DataError, match=r"train: 100 rows, the limit is 99; raise max_rows of 'mine'"):
        texts(max_rows=99)
    with pytest.raises(DataError, match=r"bytes in memory or more, the limit is 99 \(max_bytes of the source\)"):
        texts(max_bytes=99)
