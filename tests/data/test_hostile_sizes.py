"""Files that ask for more than they are: one line by name, within a limit of memory, and no process that dies."""

import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from item_tables import column_of
from polyfed.core.errors import DataError
from polyfed.data.files import regular_bytes
from polyfed.data.sounds import waveform
from polyfed.data.sources.stored import Arrow, Parquet
from polyfed.data.view import DataContext
from polyfed.data.views.mel import Mel
from polyfed.reporting.gallery import gallery_entry
from small_federations import topics

Make = Callable[[Path], object]
TEXTS = pa.array([f"text {number:03}" for number in range(100)])
CODES = pa.DictionaryArray.from_arrays(pa.array(range(101), pa.int32()), [f"w{number}" for number in range(101)])
WHERE: dict[str, Any] = {"columns": {"text": "text"}, "targets": {"label": "label"}}


def table(values: pa.Array) -> pa.Table:
    return pa.table({"text": values, "label": np.arange(len(values), dtype=np.int8) % 2})


def ipc(values: pa.Array, how: Any = pa.ipc.new_file, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with how(sink, table(values).schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table(values))
    return sink.getvalue().to_pybytes()


def bent(data: bytes, step: int, place: int, new: int) -> bytes:
    """With another number in the place of one of the 101 offsets or indices, which are ``step`` apart."""
    start = data.index(struct.pack("<101i", *range(0, 101 * step, step))) + 4 * place
    return data[:start] + struct.pack("<i", new) + data[start + 4 :]


def arrow(data: Callable[[], bytes]) -> Make:
    return lambda folder: (folder / "train.arrow").write_bytes(data())


def saved(folder: Path) -> None:
    datasets.Dataset(pa.table(table(TEXTS))).save_to_disk(str(folder))
    (file,) = folder.glob("*.arrow")
    file.write_bytes(bent(file.read_bytes(), 8, 50, 2**31 - 1))


def parquet(values: Callable[[], pa.Array], **options: Any) -> Make:
    return lambda folder: pq.write_table(table(values()), folder / "train.parquet", compression="zstd", **options)


def equal(count: int, length: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), ["x" * length])


def zeros(count: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, np.int8)))


PLAIN = {"store_schema": False}
BOUND = r"bytes in memory or more, the limit is 1,073,741,824 \(max_bytes of the source\)"
HOSTILE: dict[str, tuple[type[Arrow | Parquet], Make, str]] = {
    "offset": (Arrow, arrow(lambda: bent(ipc(TEXTS), 8, 50, 2**31 - 1)), r"train\.arrow': damaged"),
    "near offset": (Arrow, arrow(lambda: bent(ipc(TEXTS), 8, 50, 4_000)), r"train\.arrow': damaged"),
    "last offset": (Arrow, arrow(lambda: bent(ipc(TEXTS), 8, 100, 4_000)), r"train\.arrow': damaged"),
    "negative": (Arrow, arrow(lambda: bent(ipc(TEXTS), 8, 50, -8)), r"train\.arrow': damaged"),
    "stream": (Arrow, arrow(lambda: bent(ipc(TEXTS, pa.ipc.new_stream), 8, 50, 2**31 - 1)), r"train\.arrow': damaged"),
    "no UTF-8": (Arrow, arrow(lambda: ipc(TEXTS).replace(b"text 050", b"text \xff50")), "damaged .*UTF8"),
    "index": (Arrow, arrow(lambda: bent(ipc(CODES), 1, 50, 5_000)), r"train\.arrow': damaged"),
    "saved data set": (Arrow, saved, "cannot read '.*'"),
    "packed": (Arrow, arrow(lambda: ipc(pa.array(["x" * 20_000_000] * 60), compression="zstd")), BOUND),
    "rows": (
        Parquet,
        parquet(lambda: equal(20_000_000, 90), **PLAIN),
        "20,000,000 rows, the limit is 10,000,000; raise",
    ),
    "long texts": (Parquet, parquet(lambda: equal(5_000, 1_000_000), **PLAIN), BOUND),
    "categories": (Parquet, parquet(lambda: equal(5_000, 1_000_000)), BOUND),
    "longer": (Parquet, parquet(lambda: equal(300, 9_000_000), dictionary_pagesize_limit=1 << 30, **PLAIN), BOUND),
    "one list": (Parquet, parquet(lambda: zeros(200_000_000)), f"1,600,000,000 {BOUND}"),
}
QUICK = list(HOSTILE)[:8]
READ = """
import sys
from polyfed.core.errors import DataError
from polyfed.data.sources import stored
for case, kind, path in zip(*[iter(sys.argv[1:])] * 3):
    source = getattr(stored, kind)(
        path=path, columns={"text": "text"}, targets={"label": "label"}
    )
    try:
        print(case, source.open("train", name="mine", data_dir=None).modality("text").values.to_pylist()[:2])
    except DataError as error:
        print(f"{case} refused: {error}")
"""
MAIN = "import sys; from polyfed.cli.main import main; sys.exit(main(sys.argv[1:]))"


def limited(code: str, *arguments: object, gigabytes: int = 4) -> subprocess.CompletedProcess[str]:
    """Another process, which may take so much address space, as in ``ulimit -v``."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({gigabytes << 30},) * 2)\n"
    command = [sys.executable, "-c", limit + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cases", [QUICK, *(pytest.param([one], marks=pytest.mark.slow) for one in list(HOSTILE)[8:])])
def test_a_hostile_table_gives_one_line(tmp_path: Path, cases: list[str]) -> None:
    arguments = []
    for case in cases:
        source_class, make, _ = HOSTILE[case]
        (folder := tmp_path / case.replace(" ", "-")).mkdir()
        make(folder)
        arguments += [case, source_class.__name__, folder]
    ended = limited(READ, *arguments)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr[-500:]
    for case, line in zip(cases, ended.stdout.splitlines(), strict=True):
        assert re.fullmatch(f"{case} refused: .*{HOSTILE[case][2]}.*", line), line


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--dry-run",), ("--out", "{}/run")], ids=" ".join)
@pytest.mark.parametrize("case", HOSTILE)
def test_commands_give_one_line(tmp_path: Path, case: str, options: tuple[str, ...]) -> None:
    source_class, make, _ = HOSTILE[case]
    make(tmp_path)
    config = topics(name="fedavg")
    splits = {"test": ["train"] if source_class is Parquet else "train"}
    config["data"]["sources"]["texts"] = {"name": source_class.component_name(), "path": ".", "splits": splits} | WHERE
    config["data"]["sources"]["texts"]["targets"] = {"topic": "label"}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    options = tuple(option.format(tmp_path) for option in options)
    ended = limited(MAIN, "run", tmp_path / "x.yaml", "--data-dir", tmp_path, *options, gigabytes=8)
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert ended.stderr.count("rror") == 1


@pytest.mark.parametrize(
    "command",
    [("prepare", "{}", "{}-out"), pytest.param(("init", "{}.yaml", "--pairs", "{}"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_a_small_table_of_captions_takes_little_memory(tmp_path: Path, command: tuple[str, ...]) -> None:
    (folder := tmp_path / "data").mkdir()
    for number in range(20):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    (folder / "captions.csv").write_text("file_name,caption\n" + "".join(f"{n}.png,image {n}\n" for n in range(20)))
    ended = limited(MAIN, *(part.replace("{}", str(folder)) for part in command))
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("1234")
    assert regular_bytes(tmp_path / "a.csv", tmp_path, 4) == b"1234"
    monkeypatch.setattr("os.fstat", lambda descriptor: os.stat_result((stat.S_IFREG, *[0] * 5, 3, 0, 0, 0)))
    with pytest.raises(ValueError, match="3 bytes that holds more"):
        regular_bytes(tmp_path / "a.csv", tmp_path, 4)


def recording(rate: int, count: int = 100) -> bytes:
    """WAV of 8 bits."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate, 1, 8)
    return b"RIFF" + struct.pack("<I", 36 + count) + b"WAVE" + form + struct.pack("<4sI", b"data", count) + bytes(count)


@pytest.mark.parametrize("rate", [0, 1_000_001, 99_999_989, 2_147_483_629, 2**32 - 1])
def test_a_recording_of_an_unheard_rate_is_refused_before_it_is_resampled(tmp_path: Path, rate: int) -> None:
    inputs = Mel().open(column_of([recording(rate)]), "sound", DataContext(cache=tmp_path, ahead=False))
    with pytest.raises(DataError, match=rf"row 0.*100 samples at {rate:,} per second, which may be 1 to 1,000,000"):
        inputs(torch.tensor([0]))
    with pytest.raises(ValueError, match="which may be 1 to 1,000,000"):
        gallery_entry(recording(rate), playable=True)


def test_a_recording_that_would_be_of_days_is_refused() -> None:
    with pytest.raises(ValueError, match=r"800,000,000 samples at 8,000 per second, the limit is 268,435,456"):
        waveform(recording(1, 100_000), 8_000)
    assert gallery_entry(recording(1_000_000)).image


@pytest.mark.parametrize("source_class", [Parquet, Arrow])
def test_limits_of_tables_are_settings(tmp_path: Path, source_class: Any) -> None:
    parquet(lambda: TEXTS)(tmp_path)
    arrow(lambda: ipc(TEXTS))(tmp_path)

    def read(**limits: int) -> list[str]:
        split = source_class(path=str(tmp_path), **limits, **WHERE).open("train", name="mine", data_dir=None)
        return split.modality("text").texts()

    assert read(max_rows=100, max_bytes=10_000) == TEXTS.to_pylist()
    with pytest.raises(DataError, match=r"train: 100 rows, the limit is 99; raise max_rows of 'mine'"):
        read(max_rows=99)
    with pytest.raises(DataError, match=r"bytes in memory or more, the limit is 99 \(max_bytes of the source\)"):
        read(max_bytes=99)


@pytest.mark.parametrize("how", [pa.ipc.new_file, pa.ipc.new_stream, saved], ids=["file", "stream", "saved"])
def test_an_arrow_file_is_refused_before_unpacking(tmp_path: Path, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Categories count too; that no reader is opened shows that nothing is unpacked."""
    form = pa.ipc.new_stream if how is saved else how
    packed = ipc(pa.array(["x" * 200_000] * 60).dictionary_encode(), form, compression="zstd")
    file = tmp_path / "train.arrow"
    if how is saved:
        saved(tmp_path)
        (file,) = tmp_path.glob("*.arrow")
    file.write_bytes(packed)
    for name in ("_opened", "_saved"):
        monkeypatch.setattr(f"polyfed.data.sources.stored.{name}", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(DataError, match=r"2\d\d,\d{3} bytes in memory or more, the limit is 150,000 \(max_bytes"):
        Arrow(path=str(tmp_path), max_bytes=150_000, **WHERE).open("train", name="mine", data_dir=None)


@pytest.mark.skipif(sys.platform != "linux", reason="an address space has a limit on Linux alone")
def test_a_page_that_exceeds_its_header_ends_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A footer that declares 9 kB for a page of 40 MB."""
    monkeypatch.setattr("polyfed.data.sources.stored._SPARE", 1 << 24)
    options: dict[str, Any] = {"use_dictionary": False, "data_page_size": 1 << 31, "write_batch_size": 1 << 20}
    parquet(lambda: pa.array([f"{'x' * 2_000_000}{n}" for n in range(20)]), write_statistics=False, **options)(tmp_path)
    file = tmp_path / "train.parquet"
    group, data = pq.read_metadata(file).row_group(0), file.read_bytes()
    for size in (group.column(0).total_uncompressed_size, group.total_byte_size):
        data = data.replace(varint(size, 4), varint(9_000, 4))
    file.write_bytes(data)
    assert pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size == 9_000
    source = Parquet(path=str(tmp_path), max_bytes=1_000_000, **WHERE)
    with pytest.raises(DataError, match=r"more memory than 1,000,000 bytes allow \(max_bytes of the source\)"):
        source.open("train", name="mine", data_dir=None).modality("text").texts()


def varint(number: int, length: int) -> bytes:
    """A number in Thrift's encoding, padded."""
    bits = number << 1
    return bytes((bits >> 7 * place & 0x7F) | (0x80 if place < length - 1 else 0) for place in range(length))
