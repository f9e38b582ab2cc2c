"""Put on PYTHONPATH, this writes down every look-up and connection of a Python process, one file a process."""

import os
import sys

_WATCHED = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.connect", "socket.sendto")


def _record(event: str, arguments: tuple[object, ...]) -> None:
    if event in _WATCHED:
        where = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[0]
        path = os.path.join(os.environ["POLYFED_RECORD"], f"{os.getpid()}.txt")  # noqa: PTH118 - imports as little as can be
        with open(path, "a") as stream:  # noqa: PTH123
            stream.write(f"{event}\t{where!r}\t{' '.join(sys.argv[:1])}\n")


if os.environ.get("POLYFED_RECORD"):
    sys.addaudithook(_record)
