"""Checks of the way to the server: certificate, fleet API, clock, and that nothing else answers there."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from polyfed.deploy.authentication import AHEAD, BEHIND, REFUSAL, signed
from polyfed.deploy.check_setup import expiry
from polyfed.deploy.connection import Connection
from polyfed.deploy.files import SiteFolder
from polyfed.deploy.findings import Finding
from polyfed.deploy.gate import CLOSED
from polyfed.deploy.probe import ProbeAnswer, ask

FLEET = "/v1/fleet/pull-messages"
FORBIDDEN = (
    ("POST", "/v1/control/list-nodes"),
    ("POST", "/v1/control/start-run"),
    ("POST", "/v1/runtime/acquire-task"),
    ("GET", "/health"),
    ("GET", "/openapi.json"),
)
"""What SuperLink serves beside the fleet API; with the control API one runs code on every site."""

_NOT_BEHIND = (502, 503, 504)


def check_server(site: SiteFolder, connection: Connection) -> Iterator[Finding]:
    """The server is reached, is the right one, its fleet API answers, and nothing else does."""
    where = connection.host, connection.port, FLEET, site.authority
    answer = ask(*where, method="POST", body=b"")
    yield _certificate(site, connection)
    yield _fleet(answer, connection.server)
    yield from _clock(answer)
    if answer.status == 401 and site.key.is_file():
        yield _admission(ask(*where, method="POST", body=b"", headers=signed(site.key)), connection.server)
    yield from check_closed(site, connection)


def check_closed(site: SiteFolder, connection: Connection) -> Iterator[Finding]:
    """Nothing but the fleet API answers at the public address."""
    found = []
    for method, path in FORBIDDEN:
        body = b"" if method == "POST" else None
        answer = ask(connection.host, connection.port, path, site.authority, method=method, body=body)
        if (answer.status, answer.body) != (404, CLOSED.encode()):
            found.append(f"{path} ({answer.status})")
    if found:
        yield Finding(
            "error",
            "CONTROL PLANE",
            f"{connection.server} answers at {', '.join(found)}: whoever reaches it may run code on every site",
            "do not connect; tell the server's operator that only the gate of polyfed may listen at a public address",
        )
    else:
        yield Finding("ok", "control plane", f"not reachable at {connection.server}")


def _certificate(site: SiteFolder, connection: Connection) -> Finding:
    from cryptography import x509

    pem = ssl.get_server_certificate(
        (connection.host, connection.port), ca_certs=str(site.authority), timeout=10
    ).encode()
    return expiry(
        "server certificate",
        (x509.load_pem_x509_certificate(pem).not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400,
        f"{connection.host}'s, signed by ca.crt,",
        "the server's operator renews it with: polyfed deploy renew FOLDER",
    )


def _fleet(answer: ProbeAnswer, server: str) -> Finding:
    if answer.status == 401:
        return Finding("ok", "server", f"{server}: the fleet API answers, and refuses requests without a node key")
    if answer.status in _NOT_BEHIND:
        return _not_behind(server)
    text = answer.body[:80].decode(errors="replace")
    remedy = "compare 'server' in connection.yaml with what the operator says"
    if answer.status == 200:
        remedy = "the server must run with --enable-supernode-auth: start it with polyfed deploy server"
    return Finding("error", "server", f"{server}: {answer.status} {text!r} in place of the fleet API", remedy)


def _admission(answer: ProbeAnswer, server: str) -> Finding:
    """What a request without content, signed by the site, says of its key: SuperLink misses the node in it."""
    if answer.status in _NOT_BEHIND:
        return _not_behind(server)
    if answer.body == REFUSAL.encode():
        remedy = "give node.pub to the server's operator, who runs: polyfed deploy admit; is the clock right?"
        return Finding("warning", "admission", f"{server} does not know this site's key", remedy)
    return Finding("ok", "admission", f"{server} knows this site's key")


def _not_behind(server: str) -> Finding:
    remedy = "the server's operator looks at the output of: polyfed deploy server FOLDER"
    return Finding("error", "server", f"{server}: the gate answers, SuperLink behind it does not", remedy)


def _clock(answer: ProbeAnswer) -> Iterator[Finding]:
    if not answer.date:
        return
    ahead = (datetime.now(UTC) - parsedate_to_datetime(answer.date)).total_seconds()
    # the header has whole seconds, cut off, and took its time
    if ahead > AHEAD + 1 or ahead < -BEHIND:
        detail = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's; its signatures are refused"
        yield Finding("error", "clock", detail, "synchronise the clock (NTP)")
    else:
        yield Finding("ok", "clock", "agrees with the server's")
