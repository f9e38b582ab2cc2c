"""Makes the connection of a site add an array to their replies that nothing refers to, of POLYFED_FLOOD bytes.

The first reply, without which no run begins, is honest: it leaves the file POLYFED_FLOODED.
"""

import os
import sys
from pathlib import Path

if "polyfed.deploy.connection" in sys.orig_argv:
    from flwr.app import Array, ArrayRecord

    from polyfed.deploy.engines import flower_records

    honest = flower_records.to_records

    def flooding(fields, frames, *more_arguments):
        content = honest(fields, frames, *more_arguments)
        first = Path(os.environ["POLYFED_FLOODED"])
        if "answers" in fields and first.exists():
            flood = os.urandom(int(os.environ["POLYFED_FLOOD"]))
            content["flood"] = ArrayRecord({"0": Array("uint8", (len(flood),), "raw", flood)})
        if "answers" in fields:
            first.touch()
        return content

    flower_records.to_records = flooding
