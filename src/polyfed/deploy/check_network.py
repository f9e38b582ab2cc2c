"""Checks of the connection to the server: certificate, fleet API, clock, and no other answer there."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Literal

from cryptography import x509

from polyfed.core.errors import PolyfedError, RunError
from polyfed.deploy.folders import SiteFolder, days_left
from polyfed.deploy.gate import AHEAD, BEHIND, CLOSED, REFUSAL, signed
from polyfed.deploy.settings import Connection

FLEET = "/v1/fleet/pull-messages"
FORBIDDEN = (
    *(("POST", f"/v1/{path}") for path in ("control/list-nodes", "control/start-run", "runtime/acquire-task")),
    *(("GET", path) for path in ("/health", "/openapi.json")),
)
"""Requests that SuperLink serves in addition to the fleet API; its control API admits sites and starts runs."""

PROTOBUF = "application/protobuf"
_NOT_BEHIND = (502, 503, 504)
_LARGEST = 1 << 16  # bytes of an answer that are read


@dataclass(frozen=True)
class ProbeAnswer:
    """An answer over HTTP.

    Attributes:
        status: Status code.
        body: First 64 KiB of the body.
        date: The server's clock in the header ``Date``; empty if it sent none.
    """

    status: int
    body: bytes
    date: str


def ask(
    host: str,
    port: int,
    path: str,
    authority: Path,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 10.0,
) -> ProbeAnswer:
    """Send one request, past any proxy, to a server whose certificate ``authority`` (a PEM file) has signed.

    Raises:
        RunError: the authority cannot be read, the host is not reached, or its certificate is not trusted.
    """
    try:
        trust = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise RunError(f"'{authority}' is not a readable certificate: {error}") from error
    # http.client goes past proxies, which urllib would not
    connection = HTTPSConnection(host, port, timeout=timeout, context=trust)
    try:
        content_type = {"Content-Type": PROTOBUF} if body is not None else {}
        connection.request(method, path, body=body, headers={**content_type, **(headers or {})})
        answer = connection.getresponse()
        return ProbeAnswer(answer.status, answer.read(_LARGEST), answer.getheader("Date") or "")
    except ssl.SSLCertVerificationError as error:
        raise RunError(f"{host}:{port} does not present a certificate that {authority.name} signed: {error}") from error
    except (OSError, HTTPException) as error:
        raise RunError(f"{host}:{port} is not reached: {error}") from error
    finally:
        connection.close()


def check_server(site: SiteFolder, connection: Connection) -> Iterator[Finding]:
    """The server is reached and is the right one, and only its fleet API answers."""
    where, server = (connection.host, connection.port, FLEET, site.authority), connection.server
    answer = ask(*where, method="POST", body=b"")
    yield _certificate(site, connection)
    yield _fleet(answer, server)
    if answer.date:
        ahead = (datetime.now(UTC) - parsedate_to_datetime(answer.date)).total_seconds()
        # the header has seconds without fractions, and took some time
        if ahead > AHEAD + 1 or ahead < -BEHIND:
            off = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
            detail = f"{off} the server's; its signatures are refused"
            yield Finding("error", "clock", detail, "synchronise the clock (NTP)")
        else:
            yield Finding("ok", "clock", "agrees with the server's")
    if answer.status == 401 and site.key.is_file():
        # a request without content, signed by the site, lacks only the node for SuperLink
        answer = ask(*where, method="POST", body=b"", headers=signed(site.key))
        if answer.status in _NOT_BEHIND:
            yield _not_behind(server)
        elif answer.body == REFUSAL.encode():
            remedy = "send node.pub to the server's operator, who runs: polyfed deploy admit; is the clock right?"
            yield Finding("warning", "admission", f"{server} has not admitted this site's key", remedy)
        else:
            yield Finding("ok", "admission", f"{server} has admitted this site's key")
    yield from check_closed(site, connection)


def check_closed(site: SiteFolder, connection: Connection) -> Iterator[Finding]:
    """Only the fleet API answers at the public address."""
    opened = []
    for method, path in FORBIDDEN:
        body = b"" if method == "POST" else None
        answer = ask(connection.host, connection.port, path, site.authority, method=method, body=body)
        if (answer.status, answer.body) != (404, CLOSED.encode()):
            opened.append(f"{path} ({answer.status})")
    if opened:
        detail = f"{connection.server} answers at {', '.join(opened)}: anyone who reaches it may control runs"
        remedy = "do not connect; warn the server's operator: only polyfed's gate may listen at a public address"
        yield Finding("error", "CONTROL PLANE", detail, remedy)
    else:
        yield Finding("ok", "control plane", f"not reachable at {connection.server}")


def _certificate(site: SiteFolder, connection: Connection) -> Finding:
    pem = ssl.get_server_certificate((connection.host, connection.port), ca_certs=str(site.authority), timeout=10)
    left, remedy = days_left(x509.load_pem_x509_certificate(pem.encode())), "polyfed deploy renew FOLDER"
    name = f"{connection.host}'s, signed by ca.crt,"
    return expiry("server certificate", left, name, f"the server's operator renews it with: {remedy}")


def _fleet(answer: ProbeAnswer, server: str) -> Finding:
    if answer.status == 401:
        return Finding("ok", "server", f"{server}: the fleet API answers, and refuses requests without a node key")
    if answer.status in _NOT_BEHIND:
        return _not_behind(server)
    text = answer.body[:80].decode(errors="replace")
    remedy = "compare 'server' in connection.yaml with the operator's address"
    if answer.status == 200:
        remedy = "the server must run with --enable-supernode-auth: start it with polyfed deploy server"
    return Finding("error", "server", f"{server}: {answer.status} {text!r} in place of the fleet API", remedy)


def _not_behind(server: str) -> Finding:
    remedy = "the server's operator looks at the output of: polyfed deploy server FOLDER"
    return Finding("error", "server", f"{server}: the gate answers, SuperLink behind it does not", remedy)


Level = Literal["ok", "warning", "error"]
_RENEW_DAYS = 30


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        level: ``error`` keeps the site from taking part, or leaves it open to others.
        what: Subject, in a word or two.
        detail: Observation.
        remedy: Action to take, if any.
    """

    level: Level
    what: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:7} {self.what}: {self.detail}" + (f"\n        -> {self.remedy}" if self.remedy else "")


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def guarded(what: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an exception in it is a finding too, so that all further checks run."""
    try:
        yield from check()
    except PolyfedError as error:  # its text has the remedy
        yield Finding("error", what, str(error))
    except Exception as error:
        yield Finding("error", what, f"{type(error).__name__}: {error}", "compare site.yaml with the data and models")


def expiry(what: str, left: float, name: str, remedy: str) -> Finding:
    """Finding for a certificate's remaining days."""
    if left < 0:
        return Finding("error", what, f"{name} expired {-left:.0f} days ago", remedy)
    if left < _RENEW_DAYS:
        return Finding("warning", what, f"{name} expires in {left:.0f} days", remedy)
    return Finding("ok", what, f"{name} is valid for {left:.0f} days")
