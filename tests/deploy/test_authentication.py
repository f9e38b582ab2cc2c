"""Authentication at the gate: signatures of admitted keys, recent, and each for one request."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from polyfed.deploy import gate
from polyfed.deploy.folders import create_keys, read_public
from polyfed.deploy.gate import AHEAD, BEHIND, KEY_HEADER, REFUSAL, SIGNATURE_HEADER, TIME_HEADER, Signatures, signed

ORDER_OF_P384 = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return create_keys(tmp_path / "site")


@pytest.fixture
def signatures(site: Path) -> Signatures:
    made = Signatures()
    made.admit([read_public(site)])
    return made


def headers(site: Path) -> dict[str, str]:
    return signed(site.with_name("node.key"))


def test_a_request_that_an_admitted_key_has_signed_is_accepted(site: Path, signatures: Signatures) -> None:
    assert signatures.accepts(headers(site))
    assert signatures.accepts(headers(site))


def test_what_a_supernode_sends_is_accepted(site: Path, signatures: Signatures) -> None:
    """The headers are Flower's own."""
    httpx = pytest.importorskip("httpx")
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = load_ssh_private_key(site.with_name("node.key").read_bytes(), None)
    request = httpx.Request("POST", "https://localhost/v1/fleet/pull-messages")
    context = ProtobufRequestContext(rpc_method="", message=None, request=request)  # type: ignore[arg-type]
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(context, lambda _: httpx.Response(200))  # type: ignore[arg-type,union-attr]
    assert signatures.accepts({name.lower(): value for name, value in request.headers.items()})


def test_the_tolerance_is_superlinks_own() -> None:
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    assert (AHEAD, BEHIND) == (SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE)


def test_a_key_that_is_not_or_no_longer_admitted_is_refused(site: Path, signatures: Signatures, tmp_path: Path) -> None:
    other = create_keys(tmp_path / "other")
    assert not signatures.accepts(headers(other))
    signatures.admit([read_public(other)])
    assert signatures.accepts(headers(other))
    assert not signatures.accepts(headers(site))


def test_a_signature_is_good_for_one_request(site: Path, signatures: Signatures) -> None:
    once = headers(site)
    assert signatures.accepts(once)
    assert not signatures.accepts(once)
    first, second = decode_dss_signature(b64decode(once[SIGNATURE_HEADER]))
    other = encode_dss_signature(first, ORDER_OF_P384 - second)  # as valid, and computed without the key
    assert not signatures.accepts({**once, SIGNATURE_HEADER: b64encode(other).decode()})


@pytest.mark.parametrize(
    ("late", "is_accepted"),
    [(0, True), (BEHIND, True), (BEHIND + 2 * AHEAD, False), (-AHEAD / 2, True), (-2 * AHEAD, False)],
)
def test_old_and_early_signatures_are_refused(site: Path, late: float, is_accepted: bool) -> None:
    signatures = Signatures(now=lambda: datetime.now(UTC) + timedelta(seconds=late))
    signatures.admit([read_public(site)])
    assert signatures.accepts(headers(site)) == is_accepted


def test_signatures_are_forgotten_once_they_have_run_out(site: Path) -> None:
    time = [datetime.now(UTC)]
    signatures = Signatures(now=lambda: time[0])
    signatures.admit([read_public(site)])
    for _ in range(4):
        assert signatures.accepts(signed(site.with_name("node.key"), time[0]))
        time[0] += timedelta(seconds=BEHIND / 2)
    assert len(signatures.seen) == 3


@pytest.mark.parametrize("name", [KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER])
@pytest.mark.parametrize("value", [None, "", "x", "QUFB", "2026-01-01", "9" * 400, "ä", "2026-01-01T00:00:00"])
def test_what_is_absent_or_damaged_is_refused(site: Path, signatures: Signatures, name: str, value: str | None) -> None:
    shown = headers(site)
    del shown[name]
    assert not signatures.accepts(shown if value is None else {**shown, name: value})


def test_another_time_than_the_signed_one_is_refused(site: Path, signatures: Signatures) -> None:
    assert not signatures.accepts({**headers(site), TIME_HEADER: datetime.now(UTC).isoformat()})


# ---- how the gate asks


class OverSocket(http.client.HTTPConnection):
    """A connection as the gate makes it."""

    def __init__(self, address: str) -> None:
        super().__init__("gate")
        self._address = address.removeprefix("unix/")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._address)


def answered(address: str, shown: Iterable[tuple[str, str]]) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the answer to headers, of which some may come twice."""
    with contextlib.closing(OverSocket(address)) as connection:
        connection.putrequest("GET", "/")
        for name, value in shown:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}


def asked(address: str, shown: dict[str, str]) -> tuple[int, bytes]:
    return answered(address, shown.items())[:2]


def test_the_gate_is_answered_over_a_socket_that_is_this_users_without_a_word_in_any_log(
    site: Path, signatures: Signatures, capfd: pytest.CaptureFixture[str]
) -> None:
    with gate.answering(signatures.accepts) as address:
        folder = Path(address.removeprefix("unix/")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert asked(address, headers(site)) == (200, b"")
        for unsigned in ({}, {"flwr-signature": "secret"}):
            assert asked(address, unsigned) == (401, REFUSAL.encode())
        activation = {"X-Forwarded-Uri": "/v1/fleet/activate-node"}
        assert asked(address, activation) == (412, REFUSAL.encode())
        assert asked(address, headers(site) | activation) == (200, b"")
    assert not folder.exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", [KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_header_that_comes_twice_is_refused(
    site: Path, signatures: Signatures, tmp_path: Path, name: str, is_first: bool
) -> None:
    """The other one could be captured, of another site."""
    captured = [(name.title(), headers(create_keys(tmp_path / "other"))[name])]
    own = list(headers(site).items())
    with gate.answering(signatures.accepts) as address:
        status, body, _ = answered(address, [*captured, *own] if is_first else [*own, *captured])
    assert (status, body) == (401, REFUSAL.encode())


def test_the_gate_receives_the_checked_headers(site: Path, signatures: Signatures) -> None:
    own = headers(site)
    with gate.answering(signatures.accepts) as address:
        status, _, reported = answered(address, own.items())
        _, _, refused = answered(address, own.items())
    assert status == 200
    assert {name: reported[name] for name in own} == own
    assert not own.keys() & refused.keys()


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_gate_that_hangs_up_leaves_no_word_in_any_log(is_accepted: bool, capfd: pytest.CaptureFixture[str]) -> None:
    has_arrived, has_hung_up = threading.Event(), threading.Event()

    def accepts(shown: object) -> bool:
        has_arrived.set()
        assert has_hung_up.wait(60)
        return is_accepted

    before = set(threading.enumerate())
    with gate.answering(accepts) as address:
        with contextlib.closing(OverSocket(address)) as connection:
            connection.request("GET", "/")
            assert has_arrived.wait(60)
            serving = set(threading.enumerate()) - before
        has_hung_up.set()
        for thread in serving:
            if thread.name != "authentication":
                thread.join(60)
    assert capfd.readouterr() == ("", "")
