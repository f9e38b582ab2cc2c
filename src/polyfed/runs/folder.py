"""Run folders: what a run leaves on disk, complete after every round.

config.yaml       resolved configuration: running it again gives the same run
run.json          identity of the run, digest of the configuration, salt of the names of heads
environment.json  versions, device, code state
metrics.jsonl     metrics and events, one JSON object a line
ledger.jsonl      bytes that crossed the wire
timing.jsonl      seconds per round, CPU seconds of the method
pace.jsonl        of runs in virtual time: who was started and has replied when
partition.json    who holds which items
accounts.json     of each source: what was found, read, and left out
history.jsonl     what befell the run: resumed, a damaged checkpoint skipped
progress.jsonl    events of the run, for polyfed watch
tracebacks.log    tracebacks of failed clients
arrays/           matrices for plots, by name and round
checkpoints/      state of the server after each of the last two rounds, and what clients keep
models/           the run's model, last and best, and of rounds that are to be kept
vocabulary/, plots/, report.md, report.html
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from polyfed.core.errors import ExchangeError, RunError, StepError
from polyfed.core.files import cut_last_line, sync_file, sync_folder, write_atomically
from polyfed.core.tensor_files import tensor_blocks
from polyfed.core.untrusted import file_json, lines, plain, typed
from polyfed.runs.config_files import START, way_from
from polyfed.runs.events import Callback, Event, Incident

if TYPE_CHECKING:
    from torch import Tensor


FOLDERS = (
    *("arrays", "checkpoints", "models", "vocabulary", ".privacy"),
    *("analysis", "plots", "export", "hugging-face", "adapters"),
)
"""Folders of polyfed in a run folder; trackers and others may have folders of their own."""

VOCABULARY = "vocabulary"
"""Folder of what views learn from the public set, in files named after their content."""

ACCOUNTS = "accounts.json"
"""File with the counts of each source."""

LOGS = ("metrics", "ledger", "timing", "pace")

_PROBING = 1.0  # seconds; a mere look at the lock holds it for far less


@dataclass(frozen=True)
class Checkpoint:
    """The server after a complete round: named tensors, and everything else as JSON values."""

    round: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class _Manifest:
    """Description next to the tensors of a checkpoint."""

    round: int
    sha256: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class _Facts:
    """Types of the facts that a run goes on from."""

    logs: Mapping[Literal["metrics", "ledger", "timing", "pace"], int]
    stale: Sequence[str]
    best: Mapping[str, int | float]
    away: Sequence[str]
    accepted: Mapping[str, tuple[int, int]]
    recent_norms: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @classmethod
    @contextlib.contextmanager
    def create(cls, path: Path) -> Iterator[RunFolder]:
        """A new folder for a run; it is removed, with those made for it, if preparations fail before ``begin``.

        Raises:
            RunError: there is something at ``path`` already, or it cannot be created.
        """
        cls.require_free(path)
        absent = [parent for parent in path.parents if not parent.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create run folder '{path}': {error.strerror}; choose another --out") from error
        try:
            yield cls(path)
        except BaseException:
            if not cls(path).has_begun():
                shutil.rmtree(path, ignore_errors=True)
                for parent in absent:  # the nearest first
                    with contextlib.suppress(OSError):  # another run may have begun in it
                        parent.rmdir()
            raise

    @classmethod
    def require_free(cls, path: Path) -> None:
        """Raise RunError if ``path`` is in use."""
        if path.exists() and not (path.is_dir() and {entry.name for entry in path.iterdir()} <= _BEFORE):
            hint = f"'polyfed resume {path}' continues it, or choose another --out"
            raise RunError(f"run folder '{path}' exists and is not empty; {hint}")

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """The folder of a run that was started before.

        Raises:
            RunError: it is not a run folder, or its configuration was edited.
        """
        if not (path / "config.yaml").is_file() or not (path / "run.json").is_file():
            raise RunError(
                f"'{path}' is not a run folder (no config.yaml and run.json in it); give the folder of a run"
            )
        folder = cls(path)
        if folder.config_digest() not in (folder._beginning("config"), folder._beginning("next")):
            raise RunError(
                f"'{path / 'config.yaml'}' was edited after the run had started; undo the edit, "
                "or start a new run from it with polyfed run"
            )
        return folder

    def begun_by(self) -> str:
        """The version of polyfed that began the run; empty if unknown."""
        try:
            return str(file_json((self.path / "environment.json").read_bytes())["versions"]["polyfed"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def begin(
        self, run: dict[str, str], config: str, start: Path, environment: dict[str, Any], partition: dict[str, Any]
    ) -> None:
        """Write what is fixed for the whole run: ``run`` identifies it, and paths of ``config`` begin at ``start``."""
        # run.json last: while it is missing, the run has not begun and its folder may be used again
        self.write("config.yaml", config)
        self.write(START, f"{way_from(self.path.resolve(), start)}\n")
        self.write("environment.json", json.dumps(environment, indent=1) + "\n")
        self.write("partition.json", json.dumps(partition) + "\n")
        self.write("run.json", json.dumps({**run, "config": self.config_digest()}) + "\n")

    def change_config(self, config: str) -> None:
        """Give the run another configuration; the one or the other is valid whenever the process ends."""
        run = {"run": self.identity, "salt": self.salt}
        digest = hashlib.sha256(config.encode()).hexdigest()
        self.write("run.json", json.dumps({**run, "config": self.config_digest(), "next": digest}) + "\n")
        self.write("config.yaml", config)
        self.write("run.json", json.dumps({**run, "config": digest}) + "\n")

    def has_begun(self) -> bool:
        """Whether ``begin`` was completed."""
        return (self.path / "run.json").is_file()

    @property
    def identity(self) -> str:
        return self._beginning("run")

    @property
    def salt(self) -> str:
        """Salt of the names of heads, see ``ExperimentSettings.salt``; empty in runs older than it."""
        return self._beginning("salt")

    def _beginning(self, key: str) -> str:
        path = self.path / "run.json"
        try:
            return str(({"salt": "", "next": ""} | file_json(path.read_text()))[key])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"'{path}', which identifies the run, cannot be read ({reason}); restore it") from error

    def config_digest(self) -> str:
        """SHA-256 of the configuration file."""
        return hashlib.sha256((self.path / "config.yaml").read_bytes()).hexdigest()

    def write(self, name: str, text: str) -> None:
        """Write a text file, completely or not at all."""
        write_atomically(self.path / name, text.encode())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from working on this run.

        Raises:
            RunError: another process does.
        """
        with (self.path / ".lock").open("w") as stream:
            if not _locked(stream, fcntl.LOCK_EX, _PROBING):
                raise RunError(f"another process is working on run '{self.path}'; wait for it or stop it")
            yield

    def is_worked_on(self) -> bool:
        """True if a process holds the lock; a shared lock is used, so that lookers do not see each other."""
        try:
            with (self.path / ".lock").open() as stream:
                return not _locked(stream, fcntl.LOCK_SH, 0.0)
        except FileNotFoundError:
            return False

    # ---- logs

    def append(self, log: str, records: Sequence[Mapping[str, Any]]) -> None:
        with (self.path / f"{log}.jsonl").open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records)

    @property
    def tracebacks(self) -> Path:
        return self.path / "tracebacks.log"

    def add_traceback(self, round_number: int, client: str, details: str) -> None:
        with self.tracebacks.open("a", encoding="utf-8") as stream:
            stream.write(f"--- round {round_number}, client {plain(client)}\n    {lines(details)}\n")

    def log_sizes(self) -> dict[str, int]:
        paths = {log: self.path / f"{log}.jsonl" for log in LOGS}
        return {log: path.stat().st_size if path.exists() else 0 for log, path in paths.items()}

    def rewind_logs(self, sizes: Mapping[str, int]) -> None:
        """Cut each log to the size that it had.

        Raises:
            RunError: one is shorter, or what is left of it is damaged; nothing is cut then.
        """
        if lost := self.lost_records(sizes):
            raise RunError(lost)
        for log, size in _of_logs(sizes):
            if size or (self.path / f"{log}.jsonl").exists():  # not every run has every log
                with (self.path / f"{log}.jsonl").open("ab") as stream:
                    stream.truncate(size)

    def lost_records(self, sizes: Mapping[str, int]) -> str:
        """Description of what is missing of the logs at these sizes, one sentence, or empty.

        A disk that lost its power may have forgotten the end of a file, or have kept its length and zeros in it.
        """
        for log, size in _of_logs(sizes):
            path = self.path / f"{log}.jsonl"
            kept = path.read_bytes()[:size] if path.exists() else b""
            if len(kept) < size:
                return f"{path.name} has {len(kept):,} bytes of {size:,} (lost with the power?); restore it from a copy"
            if kept and (b"\0" in kept or not kept.endswith(b"\n")):
                return f"{path.name} is damaged in its first {size:,} bytes; restore it from a copy"
        return ""

    def mend_history(self) -> None:
        """Take out of ``history.jsonl`` a last line that was cut off, so that the next is a line of its own."""
        if (path := self.path / "history.jsonl").exists():
            cut_last_line(path)

    # ---- arrays and tensors

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write a safetensors file, completely or not at all."""
        write_atomically(self.path / name, tensor_blocks(tensors, metadata))

    def tensors(self, name: str) -> dict[str, Tensor] | None:
        """The content of a safetensors file of this folder, or None if it is not there."""
        import safetensors.torch

        path = self.path / name
        return safetensors.torch.load(path.read_bytes()) if path.is_file() else None

    def metadata(self, name: str) -> dict[str, str]:
        import safetensors

        with safetensors.safe_open(self.path / name, framework="pt") as opened:
            return dict(opened.metadata() or {})

    # ---- checkpoints

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Make a round durable, the logs up to here with it; its manifest, written last, makes it count.

        The last two are kept.
        """
        for path in filter(Path.exists, (self.path / f"{log}.jsonl" for log in LOGS)):
            sync_file(path)
        sync_folder(self.path)
        name = f"checkpoints/round-{checkpoint.round:06d}"
        digest = hashlib.sha256()
        write_atomically(self.path / f"{name}.safetensors", _hashed(tensor_blocks(checkpoint.tensors), digest))
        manifest = _Manifest(checkpoint.round, digest.hexdigest(), checkpoint.facts)
        self.write(f"{name}.json", json.dumps(vars(manifest)) + "\n")
        for old in self._manifests()[:-2]:  # the last but one stays for the case that the last proves damaged
            # tensors first: a manifest without them is skipped, tensors without a manifest would stay forever
            old.with_suffix(".safetensors").unlink(missing_ok=True)
            old.unlink(missing_ok=True)

    def has_checkpoints(self) -> bool:
        """Whether any round, if only the preparation, was ever completed."""
        return bool(self._manifests())

    def newest_checkpoint(
        self, problem_of: Callable[[Checkpoint], str] = lambda checkpoint: ""
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that can be used, if any, and what is wrong with those that are newer.

        Args:
            problem_of: Describes what prevents the use of a readable checkpoint; empty: it can be used.
        """
        problems: list[str] = []
        for manifest in reversed(self._manifests()):
            try:
                checkpoint = self._load_checkpoint(manifest)
            except RunError as error:
                problems.append(str(error))
                continue
            if not (problem := problem_of(checkpoint)):
                return checkpoint, problems
            problems.append(problem)
        return None, problems

    def _load_checkpoint(self, manifest: Path) -> Checkpoint:
        import safetensors.torch

        try:
            content = typed(_Manifest, file_json(manifest.read_text()))
            _ = typed(_Facts, content.facts)
            blob = manifest.with_suffix(".safetensors").read_bytes()
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"checkpoint {manifest.stem} is damaged ({reason})") from error
        if hashlib.sha256(blob).hexdigest() != content.sha256:
            raise RunError(f"checkpoint {manifest.stem} is damaged (its content does not match its checksum)")
        try:
            return Checkpoint(content.round, safetensors.torch.load(blob), content.facts)
        except safetensors.SafetensorError as error:
            raise RunError(f"checkpoint {manifest.stem} is damaged ({error})") from error

    def _manifests(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*.json"))


class History(Callback):
    """Writes incidents of the run itself, such as a resumption, at once: they are not part of its result."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def handle(self, event: Event) -> None:
        if isinstance(event, Incident) and not event.is_result:
            line = {"round": event.round, "participant": event.participant}
            self._folder.append("history", [{**line, "event": event.incident, "reason": event.reason}])


@contextlib.contextmanager
def disk_errors(folder: RunFolder) -> Iterator[None]:
    """A disk that is full or gone ends the run with what to do about it."""
    try:
        yield
    except (OSError, StepError) as caught:
        error = caught.__cause__ if isinstance(caught, StepError) else caught  # clients keep their states there too
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise  # such as a data file that is not there: not the run folder's fault
        remedy = (
            f"all complete rounds are safe: make room and continue with 'polyfed resume {folder.path}'"
            if folder.has_begun()
            else "nothing was begun: make room and start again"
        )
        raise RunError(f"cannot write to run folder '{folder.path}': {error.strerror}; {remedy}") from error


@contextlib.contextmanager
def naming_tracebacks(folder: RunFolder) -> Iterator[None]:
    """A run that ends because of clients names the file of their tracebacks."""
    try:
        yield
    except (ExchangeError, StepError) as error:
        if not folder.tracebacks.is_file():
            raise
        raise type(error)(f"{error}; clients' tracebacks: {folder.tracebacks}") from error.__cause__ or error


def _locked(stream: IO[str], operation: int, seconds: float) -> bool:
    """Lock a file for as long as it is open; False if others still hold it after so long."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(stream, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        else:
            return True


def _hashed(blocks: Iterable[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for block in blocks:
        digest.update(block)
        yield block


def _of_logs(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Sizes of the logs, which a checkpoint gives: no other file is cut."""
    return [(log, max(0, sizes[log])) for log in LOGS if log in sizes]


_BEFORE = {".lock", "vocabulary", "sites.json", ".privacy"}  # what may lie where a run begins


KEPT = "round-"
"""How names of models begin that are kept of a round."""

_OF_RUN = re.compile(rf"best|last|{KEPT}\d+")  # others are of types of clients


def untrained_best(run: Path) -> str:
    """A sentence if the model that validation chose is the one before any training, and later ones were judged too."""
    rounds = [_round_of(run / "models" / name / "config.json") for name in ("best", "last")]
    if rounds[0] != 0 or not rounds[1]:  # of a run of round 0 alone a warning has no use
        return ""
    return (
        "the best model by validation is that of round 0, before any training: no later round was better; "
        f"the model after round {rounds[1]} is called 'last'"
    )


def saved_models(run: Path) -> dict[str, int | None]:
    """Names of the saved models, and their rounds."""
    kept = sorted((run / "models").glob(f"{KEPT}*/config.json"), key=lambda file: (_round_of(file) or 0, file))
    of_types = sorted((run / "models").glob("last-*/config.json"))
    files = [*(run / "models" / name / "config.json" for name in ("best", "last")), *of_types, *kept]
    return {file.parent.name: _round_of(file) for file in files if file.is_file()}


def chosen_model(saved: Mapping[str, int | None], which: str | None) -> str | None:
    """The saved model that is called so, or is of that round; without a name the first. None: there is none, or only
    those of several types of clients, which have to be named."""
    of_run = [name for name in saved if _OF_RUN.fullmatch(name)]
    if which is None or which in saved:
        return which or next(iter(of_run), None)
    return next((name for name in of_run if which == str(saved[name])), None)


def _round_of(config: Path) -> int | None:
    """Round of a saved model; None if there is none, or its description cannot be read."""
    try:
        return int(file_json(config.read_text())["round"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
