"""Messages that are damaged, false or hostile, in both directions: refused by their receiver, and named."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_grid import FakeGrid, FakeMessage, Rule, damages_reply, damages_request
from federations_in_process import InProcess, Struck
from flwr.app import Array, ArrayRecord, ConfigRecord
from struck_runs import events, reasons

from polyfed.deploy.engines import flower_grid

Change = Callable[[Any], Any]


class Bomb:
    """Explodes when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("something was unpickled",))


PICKLE = pickle.dumps(Bomb())


def facts(change: Callable[[dict[str, Any]], Any]) -> Change:
    """A change of the JSON of a message."""

    def changed(content: Any) -> Any:
        seen = json.loads(content.config_records["polyfed"]["json"])
        seen = change(seen) or seen
        content["polyfed"] = ConfigRecord({"json": seen if isinstance(seen, str) else json.dumps(seen)})
        return content

    return changed


def header(number: int, **values: Any) -> Change:
    """A change of the header of a part."""

    def change(seen: dict[str, Any]) -> None:
        seen["parts"][number] = json.dumps(json.loads(seen["parts"][number]) | values)

    return facts(change)


def tensor_spec(*spec: Any) -> Change:
    """Another name, type and shape for the first tensor of the first part, not checked by a sum."""

    def change(seen: dict[str, Any]) -> None:
        content = json.loads(seen["parts"][0])
        content["tensors"][0] = list(spec)
        seen["parts"][0] = json.dumps(content | {"crc": "--------"})

    return facts(change)


def raw(change: Callable[[bytes], bytes]) -> Change:
    """A change of the bytes of the first tensor."""

    def changed(content: Any) -> Any:
        record = content.array_records["part-0"]
        data = change(record["0"].data)
        arrays = {key: record[key] for key in record} | {"0": Array("uint8", (len(data),), "raw", data)}
        content["part-0"] = ArrayRecord(arrays)
        return content

    return changed


def without(name: str) -> Change:
    def changed(content: Any) -> Any:
        del content[name]
        return content

    return changed


def both(first: Change, second: Change) -> Change:
    return lambda content: second(first(content))


def flipped(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 4]) + data[41:]


NOTHING = raw(lambda data: b"")
DAMAGES: dict[str, tuple[Change, str]] = {
    "flipped bit": (raw(flipped), "the bytes do not match their checksum"),
    "cut": (raw(lambda data: data[:-4]), "the bytes do not match their checksum"),
    "longer": (raw(lambda data: data + bytes(4)), "bytes"),  # a site finds by the checksum what a server does by size
    "pickled tensor": (raw(lambda data: PICKLE), "the bytes do not match their checksum"),
    "no tensors": (without("part-0"), "0 tensors where"),
    "no facts": (without("polyfed"), "damaged message: KeyError"),
    "no JSON": (facts(lambda seen: "{"), "damaged message: JSONDecodeError"),
    "a list": (facts(lambda seen: "[]"), "damaged message"),
    "deep": (facts(lambda seen: "[" * 100_000), "damaged message"),
    "pickled JSON": (facts(lambda seen: PICKLE.decode("latin-1")), "damaged message: JSONDecodeError"),
    "no parts": (facts(lambda seen: seen.pop("parts") and None), "damaged message: KeyError"),
    "kind": (header(0, kind="function"), "KeyError: 'function'"),
    "kind of kinds": (header(0, kind=["weights"]), "damaged message"),
    "attribute": (header(0, attributes={"tensors": {}}), "damaged message"),
    "attribute that is none": (header(0, attributes={"order": ["a"]}), "damaged message"),
    "attributes": (header(0, attributes=7), "damaged message"),
    "type": (tensor_spec("image", "object", [80, 8]), "KeyError: 'object'"),
    "shape": (tensor_spec("image", "float32", [81, 8]), "not 2592"),
    "shape that wraps": (tensor_spec("image", "float32", [1 << 32, 1 << 32]), "damaged message"),
    "shape that wraps to nothing": (both(tensor_spec("image", "float32", [1 << 32] * 2), NOTHING), "damaged message"),
    "shape of nothing": (both(tensor_spec("image", "float32", [1 << 70, 0]), NOTHING), "damaged message"),
    "shape beyond numbers": (tensor_spec("image", "float32", [1 << 70]), "damaged message"),
    "negative shape": (tensor_spec("image", "float32", [-80, -8]), "damaged message"),
    "infinite shape": (tensor_spec("image", "float32", [float("inf")]), "damaged message"),
}


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory, keeping_config: dict[str, Any]) -> Iterator[Struck]:
    """A session whose clients all tests here ask in turn: what one does to a client must not outlast it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flower_grid, "Message", FakeMessage)
        struck = Struck.made(tmp_path_factory.mktemp("struck"), keeping_config)
        yield struck
        assert struck.answers(), struck.reasons[-1]


@pytest.mark.parametrize("damages", [damages_request, damages_reply])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_message_is_refused_at_the_site_or_the_server(struck: Struck, name: str, damages: Any) -> None:
    change, message = DAMAGES[name]
    assert message in struck.refuses(Rule(damages(change)))


def test_frames_that_nothing_refers_to_are_refused_and_counted(struck: Struck) -> None:
    def more(content: Any) -> Any:
        content = facts(lambda seen: seen["parts"].append("{}"))(content)
        array = Array("uint8", (9000,), "raw", bytes(9000))
        content["part-" + str(len(content.array_records))] = ArrayRecord({"0": array})
        return content

    assert "no request refers to frame" in struck.refuses(Rule(damages_request(more)))
    assert "no answer refers to frame" in struck.refuses(Rule(damages_reply(more)))
    assert struck.ledger.total("up") > 9000


def test_a_frame_that_no_field_refers_to_is_refused(struck: Struck) -> None:
    def change(seen: dict[str, Any]) -> None:
        seen["parts"].append(seen["parts"][0])
        seen["answers"][0]["parts"][1] += 1

    assert "no field refers to frame 1 of its 2" in struck.refuses(Rule(damages_reply(facts(change))))


def test_a_larger_tensor_than_was_asked_for_is_refused_before_it_is_read(struck: Struck) -> None:
    larger = both(tensor_spec("image", "float32", [32, 8]), raw(lambda data: bytes(1024)))
    reason = struck.refuses(Rule(damages_reply(larger)))
    assert "reply of 1 tensors, 1,024 bytes: what was asked for has 1, 512 bytes at most" in reason
    assert struck.ledger.total("up") > 1024


# ---- false claims of a message


def text_of(field: str, **values: Any) -> Change:
    """A change of the JSON of the first request (or answer) of a message."""

    def change(seen: dict[str, Any]) -> None:
        entry = seen[field][0]
        entry["text"] = json.dumps(json.loads(entry["text"]) | values)

    return facts(change)


def entry_of(field: str, **values: Any) -> Change:
    return facts(lambda seen: seen[field][0].update(values))


def messages_of(content: Callable[[dict[str, Any]], None]) -> Change:
    """A change of the payload's own JSON in the first answer."""

    def change(seen: dict[str, Any]) -> None:
        entry = seen["answers"][0]
        text = json.loads(entry["text"])
        message = json.loads(text["message"])
        content(message)
        entry["text"] = json.dumps(text | {"message": json.dumps(message)})

    return facts(change)


def scalar(name: str, value: Any) -> Change:
    def change(message: dict[str, Any]) -> None:
        message["scalars"][name] = value
        message["fields"] = list(dict.fromkeys([*message["fields"], name]))

    return messages_of(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (text_of("requests", client="paired-0"), "client 'paired-0' does not live on this node"),
        (text_of("requests", client="../image"), "client '../image' does not live on this node"),
        (text_of("requests", step="__init__"), "'__init__' is not a client step of 'creamfl'"),
        (text_of("requests", step="evaluate_clients"), "'evaluate_clients' is not a client step of 'creamfl'"),
        (text_of("requests", round="two"), "damaged request: TypeError"),
        (text_of("requests", round=float("inf")), "damaged request: TypeError"),
        (text_of("requests", after=[700, 0]), "RunError: error "),
        (text_of("requests", after=["../../secret", 0]), "damaged request: TypeError"),
        (text_of("requests", message="[]"), "damaged message: list where an object is expected"),
        (text_of("requests", message=None), "the envelope is empty"),
        (entry_of("requests", places=[0, 99]), "IndexError"),
        (entry_of("requests", places=None), "no request refers to frame 0"),
        (entry_of("requests", text="x" * 10), "damaged message"),
    ],
)
def test_a_false_request_is_refused_at_the_site(struck: Struck, change: Change, message: str) -> None:
    assert message in struck.refuses(Rule(damages_request(change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (text_of("answers", client="paired-0"), "got the answer of 'paired-0', expected that of 'image'"),
        (entry_of("answers", client="paired-0"), "no answer refers to frame 0 of its 1"),
        (entry_of("answers", parts=[0, 1, 2]), "damaged message: ValueError"),
        (entry_of("answers", parts=["a", "b"]), "damaged message: ValueError"),
        (entry_of("answers", parts=[0, float("inf")]), "damaged message"),
        (entry_of("answers", parts=None), "damaged message: "),
        (facts(lambda seen: seen.update(answers=[1])), "damaged message: "),
        (facts(lambda seen: seen.update(answers=None)), "damaged message: "),
        (facts(lambda seen: seen.update(answers=[])), "no answer refers to frame 0 of its 1"),
        (facts(lambda seen: seen.update(answers=[], parts=[])), "record 'part-0' belongs to none of its 0 frames"),
        (facts(lambda seen: seen.pop("answers") and None), "damaged message: KeyError: 'answers'"),
        (messages_of(lambda m: m.update(schema=1)), "message of schema 1, this polyfed speaks"),
        (messages_of(lambda m: m.update(parts={"representations": 5})), "damaged message: IndexError"),
        (messages_of(lambda m: m["fields"].remove("num_examples")), "fields ['num_examples', 'representations'] where"),
        (messages_of(lambda m: m.update(scalars={}, fields=["representations"])), "reply lacks 'num_examples' (int)"),
        (scalar("secret", 1), "undeclared field 'secret'"),
        (scalar("num_examples", "ten"), "field 'num_examples' is str, declared is int"),
        (scalar("num_examples", 1.5), "field 'num_examples' is float, declared is int"),
        (scalar("num_examples", True), "field 'num_examples' is bool, declared is int"),
        (scalar("num_examples", None), "num_examples is NoneType, not a number"),
        (scalar("num_examples", [1]), "num_examples is list, not a number"),
        (scalar("num_examples", 10**400), "the whole number 10000000000000000000... is beyond 64 bits"),
        (scalar("num_examples", float("nan")), "field 'num_examples' is float, declared is int"),
    ],
)
def test_a_false_answer_is_refused_at_the_server(struck: Struck, change: Change, message: str) -> None:
    assert message in struck.refuses(Rule(damages_reply(change)))


@pytest.mark.slow
def test_a_client_cannot_be_spoken_for_by_another_site(federation: InProcess, tmp_path: Path) -> None:
    """The site of image answers for paired-0 as well; that answer comes from elsewhere and is not even looked at."""

    def more(seen: dict[str, Any]) -> None:
        entry = json.loads(json.dumps(seen["answers"][0]))
        text = json.loads(entry["text"]) | {"client": "paired-0", "error": "I am broken"}
        seen["answers"].append({"client": "paired-0", "text": json.dumps(text), "parts": [0, 0]})

    federation.grid.rules = [Rule(damages_reply(facts(more)), client="image", round=2, step="fit")]
    assert events(federation.run(tmp_path / "run").folder) == []


@pytest.mark.slow
def test_what_is_too_large_is_refused_on_both_sides(federation: InProcess, tmp_path: Path) -> None:
    """Limits are those of the receiver: here the site's own, then the run's."""
    federation.edit("image", {"limits": {"message_bytes": 3000}})  # 16 images and 80 captions, 8 x 4 bytes each
    folder = federation.run(tmp_path / "a", rounds=1, evaluate_clients=False).folder
    assert "message of 3,072 bytes, the limit is 3,000 (limits.message_bytes)" in reasons(folder)["image"]
    federation.edit("image", {"limits": {}})
    exchange = {"limits": {"message_bytes": 500}, "min_clients": 0}
    folder = federation.run(tmp_path / "b", rounds=1, evaluate_clients=False, exchange=exchange).folder
    assert reasons(folder)["image"] == "message of 512 bytes, the limit is 500 (limits.message_bytes)"


def test_the_grid_is_asked_for_no_pickle(federation: InProcess, tmp_path: Path) -> None:
    """Everything that is pushed is a JSON text and raw bytes."""
    federation.run(tmp_path / "run", rounds=1)
    assert len(federation.grid.pushed) > 4
    for message in federation.grid.pushed:
        assert json.loads(message.content.config_records["polyfed"]["json"])
        for record in message.content.array_records.values():
            assert {array.stype for array in record.values()} == {"raw"}


def test_the_fake_is_what_flower_is() -> None:
    """The calls that the engine makes of a grid are Flower's."""
    from flwr.serverapp import Grid

    for name in ("get_node_ids", "push_messages", "pull_messages"):
        assert callable(getattr(Grid, name))
        assert callable(getattr(FakeGrid, name))
