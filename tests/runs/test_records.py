from __future__ import annotations

import json
import math

import pytest
import torch
import yaml
from safetensors.torch import save_file

from polyfed.core.errors import ConfigError, RunError
from polyfed.runs.folder import RunFolder
from polyfed.runs.opened import open_run
from polyfed.runs.records import RunRecords, read_arrays
from run_folders import GROUPS, client_ids, write_lines


def measured(number, value, participant="server", kind="test"):
    return {"round": number, "participant": participant, "kind": kind, "metrics": {"r1_sum": value}}


def test_everything_that_was_written_is_read(run_folder):
    records = RunRecords.load(run_folder)
    assert records.name == "run"
    assert records.rounds == 12
    assert records.clients == tuple(client_ids())
    assert {group: len(clients) for group, clients in records.groups.items()} == GROUPS
    assert list(records.series("server", "r1_sum")) == list(range(1, 13))
    assert records.config["run"]["seed"] == 0
    assert records.warnings == ()
    assert [event.round for event in records.excluded()] == [3, 5]
    assert records.excluded()[0].reason == "loss is not finite"
    assert records.holdings["paired-0"].labels is None
    assert records.holdings["paired-0"].samples == 5 * records.holdings["paired-0"].items
    assert records.bytes_per_round("down") == dict.fromkeys(range(1, 13), 9 * 3_000_100)
    assert records.total_bytes("up") == 12 * 9 * 1_500_100
    assert records.total_bytes() == records.total_bytes("up") + records.total_bytes("down")


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, "{", "[]", "{}"])
def test_a_run_without_a_readable_identity_is_refused(run_folder, text):
    (run_folder / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run.json', which identifies the run, cannot be read"):
        RunFolder.existing(run_folder)


def test_series_last_and_best(tmp_path):
    lines = [measured(2, 5.0), measured(1, 7.0), measured(3, math.nan), measured(4, 7.0), measured(2, 6.0)]
    write_lines(tmp_path / "metrics.jsonl", [*lines, measured(9, 99.0, kind="validation")])
    records = RunRecords.load(tmp_path)
    series = records.series("server", "r1_sum")
    assert list(series) == [1, 2, 3, 4]
    assert series[2] == 6.0
    assert records.last("server") == {"r1_sum": 7.0}
    assert records.best("server", "r1_sum") == (1, 7.0)
    assert records.best("server", "accuracy") is None
    assert records.last("image-0") == {}
    assert records.metric_names("server", "validation") == ("r1_sum",)


def test_a_cut_off_last_line_is_left_out_with_a_warning(tmp_path):
    complete = json.dumps(measured(1, 3.0)) + "\n"
    for cut in range(1, len(complete) - 1):
        (tmp_path / "metrics.jsonl").write_text(complete + complete[:cut])
        records = RunRecords.load(tmp_path)
        assert records.series("server", "r1_sum") == {1: 3.0}
        if cut < len(complete) - 2:
            assert "metrics.jsonl: the last line is cut off" in records.warnings[0]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ledger.jsonl", '{"round": 1, "cli\n{"round": 1}\n', "ledger.jsonl line 1 is damaged"),
        ("ledger.jsonl", '{"round": 1}\n', "ledger.jsonl line 1 is not a valid transfer: client: Field required"),
        ("metrics.jsonl", '{"event": "resumed", "kind": "event"}\n', "line 1 is not a valid event: round: Field req"),
        ("timing.jsonl", '{"round": 1}\n', "timing.jsonl line 1 is not a valid timing: seconds: Field required"),
        ("metrics.jsonl", f"{DEEP}\n{{}}\n", "metrics.jsonl line 1 is damaged: JSON that is nested too deeply"),
        ("partition.json", "{", "partition.json is damaged"),
    ],
)
def test_damage_elsewhere_is_an_error_with_file_and_line(tmp_path, file, text, message):
    (tmp_path / file).write_text(text)
    with pytest.raises(RunError, match=message):
        RunRecords.load(tmp_path)


def test_a_table_that_is_not_there_is_refused_with_those_that_are(run_folder):
    with pytest.raises(ConfigError, match="no table 'partition'; valid: events, metrics, rounds, traffic"):
        open_run(run_folder).to_pandas("partition")


def test_frames_hold_what_the_records_hold(run_folder):
    records = RunRecords.load(run_folder)
    metrics = records.frame("metrics")
    server = metrics.query("participant == 'server' and kind == 'test' and metric == 'r1_sum'")
    assert dict(zip(server["round"], server["value"], strict=True)) == records.series("server", "r1_sum")
    assert set(metrics["group"]) == {"server", *GROUPS}
    traffic = records.frame("traffic")
    sent = {direction: records.total_bytes(direction) for direction in ("down", "up")}
    assert traffic.groupby("direction")["bytes"].sum().to_dict() == sent
    assert traffic["full"].sum() == records.full_bytes()
    rounds = records.frame("rounds").set_index("round")
    assert rounds["seconds"].to_dict() == records.seconds
    assert rounds["up"].to_dict() == records.bytes_per_round("up")
    assert list(records.frame("events")["reason"]) == ["loss is not finite", "no answer in 60 s"]


def test_an_empty_folder_is_an_empty_run_and_a_missing_one_an_error(tmp_path):
    records = RunRecords.load(tmp_path)
    assert (records.rounds, records.clients, records.arrays(), records.total_bytes()) == (0, (), {}, 0)
    assert all(records.frame(table).empty for table in ("metrics", "events", "traffic", "rounds"))
    with pytest.raises(RunError, match="no run folder"):
        RunRecords.load(tmp_path / "nowhere")


def test_clients_outside_the_partition_are_a_group_of_their_own(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [measured(1, 1.0, participant="b"), measured(1, 1.0, participant="a")])
    assert RunRecords.load(tmp_path).groups == {"clients": ("b", "a")}


GROUP, OTHER = {"count": 1, "source": "a"}, {"count": 1, "source": "b"}


@pytest.mark.parametrize(
    ("config", "sites"),
    [
        ({"clients": {"north": GROUP, "south": OTHER}}, ("north", "south")),
        ({"clients": {"north": GROUP, "south": GROUP}}, ()),
        ({"clients": {"north": GROUP, "south": OTHER, "more": OTHER | {"source": "c", "count": 2}}}, ()),
        ({"run": {"engine": {"name": "flower", "sites": ["south", "north"]}}}, ("north", "south")),
        ({"clients": {"north": 3}, "run": {"engine": "local"}}, ()),
    ],
)
def test_sites_are_clients_alone_in_their_group_with_a_source_of_their_own(tmp_path, config, sites):
    write_lines(tmp_path / "metrics.jsonl", [measured(1, 1.0, participant=name) for name in ("north", "south")])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert RunRecords.load(tmp_path).site_names == sites


# ---- test_arrays


def write(folder, number, values, clients):
    folder.mkdir(parents=True, exist_ok=True)
    metadata = None if clients is None else {"clients": json.dumps(clients)}
    save_file({"values": values}, folder / f"round-{number:04d}.safetensors", metadata)


def test_arrays_are_read_by_name_and_round(tmp_path):
    values = torch.rand(2, 3)
    write(tmp_path / "weights.image", 10, values, ["a", "b"])
    write(tmp_path / "weights.image", 2, values[:1], ["b"])
    write(tmp_path / "weights.text", 2, values, ["a", "b"])
    seen = read_arrays(tmp_path)
    assert {name: list(rounds) for name, rounds in seen.items()} == {"weights.image": [2, 10], "weights.text": [2]}
    assert seen["weights.image"][10].clients == ("a", "b")
    assert seen["weights.image"][10].values == pytest.approx(values.numpy())


def test_damaged_arrays_are_named(tmp_path):
    folder = tmp_path / "w"
    write(folder, 1, torch.rand(2, 3), None)
    with pytest.raises(RunError, match=r"w/round-0001.safetensors is damaged"):
        read_arrays(tmp_path)
    write(folder, 1, torch.rand(2, 3), ["a"])
    with pytest.raises(RunError, match=r"shape \(2, 3\) for 1 clients"):
        read_arrays(tmp_path)
    (folder / "round-0001.safetensors").write_bytes(b"short")
    with pytest.raises(RunError, match="damaged"):
        read_arrays(tmp_path)
