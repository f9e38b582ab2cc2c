"""With a site's folder and the server's public address, a site can take part and nothing else.

Against real processes on loopback: SuperLink and Caddy as ``polyfed deploy server`` starts them.
"""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from federations import Live, Started, wait_until

from polyfed.core.errors import RunError
from polyfed.deploy import flower_programs, launch
from polyfed.deploy.check_network import FLEET, FORBIDDEN, PROTOBUF, ask
from polyfed.deploy.folders import SiteFolder, create_authority, create_keys, write_new
from polyfed.deploy.gate import BODY_LIMIT, CLOSED, REFUSAL, SIGNATURE_HEADER, signed
from polyfed.deploy.serve import site_commands
from polyfed.deploy.settings import Connection, SiteConfig, load_settings
from wire import http1, http2, lines, posted, raw

pytestmark = pytest.mark.slow

LIST = "/v1/control/list-nodes"


def connection(site: SiteFolder, log: Path, environment: dict[str, str]) -> Started:
    settings = load_settings(Connection, site.connection), SiteConfig.load(site.config)
    command = site_commands(site, *settings, log.parent / "worker")["connection"]
    return Started([*command], log, flower_programs.flower_environment(site.home) | environment)


def intruder(live: Live, folder: Path) -> SiteFolder:
    """Files of a site that was never admitted: the authority's certificate, the address, a key of its own."""
    site = SiteFolder(folder / "intruder")
    known = live.folders.site("archive")
    for path in (known.config, known.agreed, known.connection, known.authority):
        write_new(site.path / path.name, path.read_bytes())
    create_keys(site.path)
    return site


# ---- who may take part


def test_admitted_sites_come_online_and_an_unknown_key_is_refused(live: Live, tmp_path: Path) -> None:
    known = connection(live.folders.site("archive"), tmp_path / "known.log", live.environment)
    unknown = connection(intruder(live, tmp_path), tmp_path / "unknown.log", live.environment)
    try:
        known.wait_for("connected to")
        assert unknown.process.wait(60) == 1
        assert "Exit Code: 305" in unknown.output
        assert sorted(node["status"] for node in live.folders.link.nodes()) == ["online", "registered"]
    finally:
        known.stop()
        unknown.stop()


def test_without_a_key_no_site_takes_part(live: Live, tmp_path: Path) -> None:
    site = live.folders.site("archive")
    command = [flower_programs.program("flower-supernode"), "--superlink", f"localhost:{live.folders.address.port}"]
    command += ["--root-certificates", str(site.authority)]
    process = Started(command, tmp_path / "log", flower_programs.flower_environment(site.home))
    try:
        assert process.process.wait(60) == 1
        assert "Exit Code: 305" in process.output
    finally:
        process.stop()
    assert len(live.folders.link.nodes()) == 2


# ---- what else the public port answers


SUPERLINKS = b"Invalid SuperNode authentication"  # of a signed request that names no node


def credentials(live: Live) -> dict[str, str]:
    """Headers of a request that the archive has signed."""
    return signed(live.folders.site("archive").key)


def answer(live: Live, target: str, **how: str) -> tuple[int, bytes]:
    """To a request that an admitted site has signed: what is closed must be closed to sites too."""
    how["headers"] = how.get("headers", "") + lines(credentials(live))
    seen = http1(live.folders.address.port, live.folders.server.authority[0], target, **how)
    return seen.status, seen.body


def test_superlink_itself_would_answer_what_the_gate_refuses(live: Live) -> None:
    """Otherwise the tests below would show nothing."""
    address, authority = live.folders.address, live.folders.server.authority[0]
    for method, path in FORBIDDEN:
        body = b"" if method == "POST" else None
        direct = ask("127.0.0.1", address.superlink_port, path, authority, method=method, body=body)
        assert direct.status != 404, path
    for given, expected in ({}, 401), ({"Authorization": f"Bearer {live.folders.server.secret.read_text()}"}, 200):
        direct = ask("127.0.0.1", address.superlink_port, LIST, authority, method="POST", body=b"", headers=given)
        assert direct.status == expected
    status, body = answer(live, FLEET)
    assert status == 401
    assert SUPERLINKS in body  # it has come to SuperLink


TRICKS = [
    *(path for _, path in FORBIDDEN),
    *("/v1/control/register-node", "/v1/runtime/get-nodes", "/docs", "/", "/v1/fleet", "/v1/fleet/"),
    *("/v1/fleet/../control/list-nodes", "/v1/fleet/./../control/list-nodes"),
    *("/v1/fleet/..%2fcontrol/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes"),
    *("/v1/fleet/%2e%2e%2fcontrol%2flist-nodes", "/v1/fleet/%252e%252e/control/list-nodes"),
    *("/v1/fleet/..;/control/list-nodes", "/v1/fleet/..\\control\\list-nodes"),
    *("/v1/fleet//../control/list-nodes", "//v1/control/list-nodes", "//v1//control//list-nodes"),
    *("/./v1/control/list-nodes", "/%76%31/control/list-nodes", "/v1/%63ontrol/list-nodes"),
    *("/V1/CONTROL/LIST-NODES", "/V1/FLEET/PULL-MESSAGES", "/v1/fleet/pull-messages/../../control/list-nodes"),
    *("/v1/control/list-nodes?/v1/fleet/pull-messages", "/v1/control/list-nodes#/v1/fleet/pull-messages"),
    *("/v1/control/list-nodes;/v1/fleet/pull-messages", "/v1/fleet/pull-messages/extra"),
    *("/v1/fleet/register-node", "/v1/fleet/unregister-node", "https://localhost/v1/control/list-nodes"),
    "http://127.0.0.1/v1/control/list-nodes",
]


@pytest.mark.parametrize("target", TRICKS)
def test_only_the_fleet_api_passes_the_gate(live: Live, target: str) -> None:
    bad = b"400 Bad Request"
    assert answer(live, target) in ((404, CLOSED.encode()), (400, bad), (400, bad + b": malformed Host header"))


@pytest.mark.parametrize(
    "headers",
    [
        *(f"X-{name}: {LIST}\r\n" for name in ("Original-URL", "Rewrite-URL")),
        *(f"X-Forwarded-{name}: {LIST}\r\n" for name in ("Prefix", "Uri", "Path")),
        "X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: 127.0.0.1\r\nX-Forwarded-Proto: https\r\n",
        f"X-HTTP-Method-Override: GET\r\nForwarded: for=127.0.0.1;host=127.0.0.1\r\nReferer: {LIST}\r\n",
    ],
    ids=lambda headers: headers.split(":")[0],
)
def test_no_header_opens_another_way(live: Live, headers: str) -> None:
    assert answer(live, LIST, headers=headers) == (404, CLOSED.encode())
    assert SUPERLINKS in answer(live, FLEET, headers=headers)[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:{superlink}", "superlink", "localhost:{superlink}", "[::1]"])
def test_no_host_header_opens_another_way(live: Live, host: str) -> None:
    named = host.format(superlink=live.folders.address.superlink_port)
    assert answer(live, LIST, host=named) == (404, CLOSED.encode())


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "CONNECT", "TRACE", "OPTIONS", "PROPFIND"])
def test_no_other_method_passes(live: Live, method: str) -> None:
    assert answer(live, FLEET, method=method)[0] in (404, 400, 405, 501)
    assert answer(live, LIST, method=method)[0] in (404, 400, 405, 501)


def test_http2_does_not_open_another_way(live: Live) -> None:
    port, authority = live.folders.address.port, live.folders.server.authority[0]
    assert http2(port, authority, FLEET) == REFUSAL.encode()
    assert SUPERLINKS in http2(port, authority, FLEET, credentials(live))
    for target in ("/v1/fleet/../control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes", LIST, "//v1/control/x"):
        assert http2(port, authority, target, credentials(live)) == CLOSED.encode(), target


def test_a_second_request_cannot_be_smuggled_in_a_first(live: Live) -> None:
    inner = f"POST {LIST} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\nContent-Length: 0\r\n\r\n".encode()
    port, authority = live.folders.address.port, live.folders.server.authority[0]
    for lengths in (
        f"Content-Length: {len(inner)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        b"Content-Length: 0\r\n\r\n",
        f"Content-Length: 0\r\nContent-Length: {len(inner)}\r\n\r\n".encode(),
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    ):
        who = lines(credentials(live))
        head = f"POST {FLEET} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {PROTOBUF}\r\n{who}".encode()
        seen = raw(port, authority, head + lengths + inner.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert b"node" not in seen.body.replace(b"SuperNode", b""), lengths
    log = live.process.output
    assert f'127.0.0.1:0 - "POST {LIST}' not in log, "a request for the control API came through the gate"


def test_a_body_beyond_what_flower_sends_is_refused(live: Live) -> None:
    port, authority = live.folders.address.port, live.folders.server.authority[0]

    def status(path: str, size: int) -> int:
        return posted(port, authority, path, bytes(size), credentials(live)).status

    assert status(PUSH, 6 * 2**20) == 400  # from SuperLink: zeros are not a message
    assert status(PUSH, BODY_LIMIT + 1) == 413
    assert status(FLEET, 2**20 + 1) == 413  # what brings nothing is small


# ---- before authentication

PUSH = "/v1/fleet/push-object"


def test_a_strangers_body_is_refused_unread(live: Live, tmp_path: Path) -> None:
    """However many there are: SuperLink, which reads a request before it looks who signed it, gets none of them."""
    port, authority = live.folders.address.port, live.folders.server.authority[0]
    body = b"\x7a\x80\x80\xc0\x07" + bytes(15 * 2**20)  # a message with an unknown field
    stranger = create_keys(tmp_path / "stranger").with_name("node.key")
    stale = {**credentials(live), SIGNATURE_HEADER: "AAAA"}

    def refused(number: int) -> str:
        seen = posted(port, authority, "/v1/fleet/push-messages", body, [{}, stale, signed(stranger)][number % 3])
        return "" if (seen.status, seen.body) in ((401, REFUSAL.encode()), (0, b"")) else f"{seen}"

    superlink = _superlink(live)
    before, requests = superlink.memory_info().rss, live.process.output.count("push-messages")
    with ThreadPoolExecutor(12) as pool:
        assert set(pool.map(refused, range(12))) == {""}
    assert live.process.output.count("push-messages") == requests
    assert superlink.memory_info().rss - before < 50 * 2**20  # all bodies are 180 MiB


def _superlink(live: Live) -> psutil.Process:
    family = psutil.Process(live.process.process.pid).children(recursive=True)
    return next(process for process in family if "deploy.superlink" in " ".join(process.cmdline()))


def test_no_log_holds_a_signature_and_none_is_good_twice(live: Live) -> None:
    port, authority, who = live.folders.address.port, live.folders.server.authority[0], credentials(live)
    assert SUPERLINKS in posted(port, authority, FLEET, b"", who).body
    assert posted(port, authority, FLEET, b"", who).body == REFUSAL.encode()
    superlink = _superlink(live)
    superlink.suspend()  # so that the gate has an error to log
    try:
        with pytest.raises(RunError, match="timed out"):
            ask("localhost", port, FLEET, authority, method="POST", body=b"", headers=credentials(live), timeout=1)
    finally:
        superlink.resume()
    logs = live.folders.server.logs
    texts = [path.read_text(errors="replace") for path in logs.iterdir()] + [live.process.output]
    assert FLEET in "".join(texts)
    for text in texts:
        assert who[SIGNATURE_HEADER] not in text
        assert "signature" not in text.lower()
    assert [path.name for path in logs.iterdir() if path.stat().st_mode & 0o77] == []


# ---- Flower's own command line, and an app of an attacker


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """Passes for polyfed's, asks a site for something else, and writes down what came of it."""
    write_new(tmp_path / "app" / "pyproject.toml", launch._APP["pyproject.toml"])
    write_new(tmp_path / "app" / "polyfed_server.py", _CODE)
    return tmp_path / "app"


@pytest.mark.parametrize("where", ["the gate", "SuperLink itself"])
def test_without_a_credential_flowers_commands_get_nowhere(live: Live, tmp_path: Path, app: Path, where: str) -> None:
    port = live.folders.address.port if where == "the gate" else live.folders.address.superlink_port
    new, home = create_keys(tmp_path / "new"), tmp_path / "home"
    before = live.folders.link.nodes()
    write_new(home / "ca.crt", live.folders.server.authority[0].read_bytes())
    link = flower_programs.Link(home, f"localhost:{port}", home / "ca.crt")
    for arguments in (["supernode", "register", str(new)], ["supernode", "list"], ["list"], ["run", str(app)]):
        with pytest.raises(RunError, match="Authentication failed" if where != "the gate" else "failed"):
            link.call(*arguments)
    assert {node["node-id"] for node in live.folders.link.nodes()} == {node["node-id"] for node in before}


def test_the_server_half_of_a_run_cannot_be_taken_without_the_secret(live: Live) -> None:
    address, authority = live.folders.address, live.folders.server.authority[0]
    for path in ("acquire-task", "push-messages", "pull-messages", "get-nodes"):
        asked = ask("127.0.0.1", address.superlink_port, f"/v1/runtime/{path}", authority, method="POST", body=b"")
        assert asked.status == 401, path


def test_a_site_does_not_run_an_app_submitted_with_the_servers_secret(live: Live, tmp_path: Path, app: Path) -> None:
    """An intruder on the server's machine has it."""
    running, out = connection(live.folders.site("archive"), tmp_path / "log", live.environment), tmp_path / "out"
    try:
        running.wait_for("connected to")
        live.folders.link.call("run", str(app), "--run-config", f'launch="{out}"')
        wait_until(lambda: out.exists() and bool(out.read_text()), 90, lambda: live.process.output)
    finally:
        running.stop()
    assert out.read_text() == "'query.steal' is for an app of the server, and this site runs none"
    assert not (live.folders.site("archive").home / "apps").exists(), "nothing was unpacked"


_CODE = """\
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
server = ServerApp()

@server.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    sent = list(grid.push_messages([Message(RecordDict(), node, "query.steal") for node in nodes]))
    while not (replies := list(grid.pull_messages(sent))):
        time.sleep(0.2)
    Path(str(context.run_config["launch"])).write_text(str(replies[0].error.reason))
"""


# ---- transport


def test_plain_http_is_refused(live: Live) -> None:
    for port in (live.folders.address.port, live.folders.address.superlink_port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request("POST", FLEET, body=b"", headers={"Content-Type": PROTOBUF})
            assert connection.getresponse().status == 400
        except (ConnectionResetError, http.client.BadStatusLine):
            pass  # closed without a word
        finally:
            connection.close()


def test_a_site_refuses_a_server_of_another_authority(live: Live, tmp_path: Path) -> None:
    site = intruder(live, tmp_path)
    site.authority.write_bytes(create_authority("other").certificate)
    process = connection(site, tmp_path / "log", live.environment)
    try:
        process.wait_for("certificate verify failed", 60)
    finally:
        process.stop()
    assert "connected to" not in process.output


def test_superlink_listens_on_loopback_alone(live: Live) -> None:
    port = f":{live.folders.address.superlink_port:04X}"
    listening = "0A"
    seen = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
        seen += [row[1] for row in rows if row[3] == listening and row[1].endswith(port)]
    assert seen == [f"0100007F{port}"]
