"""Put on PYTHONPATH, this kills a site's worker when it has stored what it keeps of a masked sum, and not yet answered.

``POLYFED_KILL`` is a file, in which each time is a byte, and numbers of times: ``/a/file:1,3``.
"""

import os
import signal
import sys

_stored = False


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    global _stored
    if event == "os.rename" and str(arguments[1]).endswith("/masks.json"):
        _stored = True
    elif event == "open" and _stored:  # the folder, to flush it: the file is in its place by now
        _stored = False
        path, _, times = os.environ["POLYFED_KILL"].partition(":")
        with open(path, "ab") as stream:  # noqa: PTH123 - imports as little as can be
            stream.write(b".")
            stream.flush()
            count = stream.tell()
        if str(count) in times.split(","):
            os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("POLYFED_KILL"):
    sys.addaudithook(_watch)
