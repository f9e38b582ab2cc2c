"""A picture of a run while it goes on, for a terminal of any size: metrics, cohort, traffic, time and events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from threading import RLock

from rich.console import Console, ConsoleOptions, Group
from rich.layout import Layout
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from polyfed.reporting.client_spread import PREFERRED
from polyfed.reporting.run_state import PREPARING, ClientProgress, RunState, ticking
from polyfed.reporting.tables import duration, figure, mib
from polyfed.runs.records import SERVER

_CurveKey = tuple[str, str, str]  # participant, kind, metric
_SIDE_BY_SIDE = 76  # columns; narrower screens have the cohort below the metrics
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_SIGNS = {"waiting": "·", "working": "▶", "done": "✓", "excluded": "✗"}
_ASCII_SIGNS = {"waiting": ".", "working": ">", "done": "+", "excluded": "x"}
_STYLES = {"waiting": "dim", "working": "yellow", "done": "green", "excluded": "bold red"}
_NOTEWORTHY = ("excluded", "working", "done", "waiting")  # the first are shown where there is no room for all
_KINDS = ("test", "validation", "train")


class RunPicture:
    """Draws a state into whatever room it is given; make a new one for each drawing.

    Args:
        state: what is drawn.
        lock: held while the state is read.
        height: lines; by default all that there are.
    """

    def __init__(self, state: RunState, lock: RLock | None = None, height: int | None = None) -> None:
        self._state, self._height = state, height
        self._lock = lock or RLock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        self._width, self._ascii = options.max_width, options.ascii_only
        self._bars, self._signs = (_ASCII_BARS, _ASCII_SIGNS) if self._ascii else (_BARS, _SIGNS)
        with self._lock:  # all is text when the layout is done, so the state may change while it is printed
            height = self._height or options.height or console.height
            layout = self._layout(height)
        yield from console.render(layout, options.update(height=height))

    def _layout(self, height: int) -> Layout:
        """Header, metrics and cohort, traffic and time, events: the first that fit."""
        narrow = self._width < _SIDE_BY_SIDE
        left = height - 3
        traffic = (4 if narrow else 3) if left >= 12 else 0
        events = min(8, (left - 9) // 3 + 2, max(1, len(self._state.events)) + 2) if left >= 14 else 0
        middle = left - traffic - events
        rows = [Layout(self._header(), size=min(3, height))]
        if middle >= 3:
            rows.append(self._narrow_middle(middle) if narrow else self._wide_middle(middle))
        if traffic:
            rows.append(Layout(self._traffic(narrow), size=traffic))
        if events:
            rows.append(Layout(self._events(events - 2), size=events))
        screen = Layout()
        screen.split_column(*rows)
        return screen

    def _wide_middle(self, height: int) -> Layout:
        half, middle = (self._width + 1) // 2, Layout(size=height)
        middle.split_row(Layout(self._metrics(height - 2, half - 4), size=half), Layout(self._cohort(height - 2)))
        return middle

    def _narrow_middle(self, height: int) -> Layout:
        if height < 8:
            return Layout(self._cohort(height - 2), size=height)
        upper, middle = height // 2, Layout(size=height)
        metrics = Layout(self._metrics(upper - 2, self._width - 4), size=upper)
        middle.split_column(metrics, Layout(self._cohort(height - upper - 2)))
        return middle

    def _header(self) -> Panel:
        state = self._state
        moment = self._moment()
        room = max(0, min(30, self._width - 60))
        if state.rounds and room:
            full = round(state.share * room)
            moment = f"{self._bars[-1] * full}{self._bars[0] * (room - full)}  {moment}"
        if state.elapsed:
            moment += f"  {ticking(state.elapsed)} elapsed"
        if state.left is not None and not state.finished:
            moment += f", about {ticking(state.left)} left"
        return self._panel([self._text(moment, "bold")], _one_line(state.name) or "polyfed")

    def _moment(self) -> str:
        state = self._state
        if state.finished:
            return "finished"
        if state.round:
            return f"round {state.round}" + (f" of {state.rounds}" if state.rounds else "")
        return self._activity_of(PREPARING, SERVER) or "not begun"

    def _activity_of(self, *participants: str) -> str:
        """The current activity if it is that of one of ``participants``, else empty."""
        activity = self._state.activity
        return str(activity) if activity is not None and activity.who in participants else ""

    # ---- metrics

    def _metrics(self, rows: int, width: int) -> Panel:
        courses = {key: list(curve.by_round().values()) for key, curve in self._state.curves.items()}
        chosen = chosen_curves(list(courses), rows)
        if not chosen:
            return self._panel([self._text("nothing is measured yet", "dim")], "metrics")
        parts: list[Text] = []
        lines = self._metric_lines({key: courses[key] for keys in chosen.values() for key in keys}, width)
        for group, keys in chosen.items():
            total = sum(key[:2] == group for key in courses)
            shown = "" if len(keys) == total else f" ({len(keys)} of {total})"
            parts += [self._text(_one_line(" ".join(group)) + shown, "bold"), *(lines[key] for key in keys)]
        return self._panel(parts, "metrics: last and change")

    def _metric_lines(self, courses: Mapping[_CurveKey, Sequence[float]], width: int) -> dict[_CurveKey, Text]:
        values = _right_aligned(figure(course[-1]) for course in courses.values())
        changes = _right_aligned(map(_change, courses.values()))
        labels = {key: _one_line(key[2]) for key in courses}
        room, longest = width - len(values[0]) - len(changes[0]) - 2, max(map(len, courses.values()))
        # names are whole if that leaves the sparklines eight columns
        names = max(1, min(max(map(len, labels.values())), room - 2 - min(8, longest)))
        spark = max(0, min(40, longest, room - 2 - names))
        return {
            key: self._text(f" {self._short(labels[key], names):{names}} ")
            .append(f"{sparkline(course, spark, self._bars):{spark}}", "cyan")
            .append(f" {value} {change}")
            for (key, course), value, change in zip(courses.items(), values, changes, strict=True)
        }

    def _short(self, text: str, width: int) -> str:
        if len(text) <= width:
            return text
        tail = width // 2
        return text[: width - tail - 1] + ("~" if self._ascii else "…") + text[len(text) - tail :]

    # ---- cohort

    def _cohort(self, rows: int) -> Panel:
        state = self._state
        counts = Counter(client.status for client in state.clients.values())
        title = [f"round {state.round}", _one_line(state.step)] if state.round else ["no round yet"]
        if state.clients:
            title.append(f"{counts['done']}/{len(state.clients)} done")
        if counts["excluded"]:
            title.append(f"{counts['excluded']} excluded")
        lines = []
        if state.round and rows > 1 and (server := self._activity_of(SERVER, PREPARING)):
            lines.append(self._text(f"{self._signs['working']} {_one_line(server)}", _STYLES["working"]))
        lines += self._client_lines(max(0, rows - len(lines)))
        return self._panel(lines, "  ".join(filter(None, title)))

    def _client_lines(self, rows: int) -> list[Text]:
        clients = self._state.clients
        if not clients:
            total = f"{self._state.total_clients:,} clients, " if self._state.total_clients else ""
            return [self._text(f"{total}no cohort yet", "dim")]
        if len(clients) <= rows:
            return [self._client(client, progress) for client, progress in clients.items()]
        groups = self._group_lines(rows // 2)
        # of those who work, who began first; of those who are done, who took longest
        noteworthy = sorted(
            clients.items(),
            key=lambda item: (
                _NOTEWORTHY.index(item[1].status),
                item[1].since if item[1].status == "working" else -item[1].seconds,
            ),
        )
        return groups + [self._client(client, progress) for client, progress in noteworthy[: rows - len(groups)]]

    def _group_lines(self, rows: int) -> list[Text]:
        """A line a group; nothing if there is room for none but a line that says how many there are."""
        groups = self._state.groups()
        shown = list(groups) if len(groups) <= rows else list(groups)[: max(0, rows - 1)]
        lines = []
        for name in shown:
            counts = Counter(client.status for client in groups[name].values())
            others = [f"{counts[status]} {status}" for status in ("working", "excluded") if counts[status]]
            line = f"{_one_line(name)}: " + ", ".join([f"{counts['done']}/{len(groups[name])} done", *others])
            lines.append(self._text(line, "bold red" if counts["excluded"] else "bold"))
        if shown and len(shown) < len(groups):
            lines.append(self._text(f"... {len(groups) - len(shown)} more groups", "dim"))
        return lines

    def _client(self, client: str, progress: ClientProgress) -> Text:
        share = f"  {progress.share:.0%}" if progress.share else ""
        alone = self._activity_of(client).removeprefix(client)  # says more of what it does, if nobody else works
        what = {
            "waiting": "waiting",
            "working": alone or f"{progress.step} {ticking(self._state.working_for(progress))}{share}",
            "done": duration(progress.seconds),
            "excluded": progress.reason or "excluded",
        }[progress.status]
        line = f"{self._signs[progress.status]} {_one_line(client)}  {_one_line(what)}"
        return self._text(line, _STYLES[progress.status])

    # ---- traffic, time, events

    def _traffic(self, narrow: bool) -> Panel:
        state = self._state
        arrow_up, arrow_down = ("up", "down") if self._ascii else ("↑", "↓")
        up, down = map(mib, state.bytes)
        sent, pace = f"{arrow_up} {up}  {arrow_down} {down} MiB  ", ""
        if state.sent:
            last_up, last_down = map(mib, state.sent[max(state.sent)])
            sent += f"(last round {last_up}, {last_down})"
        if state.seconds:
            times = [state.seconds[number] for number in sorted(state.seconds)]
            pace = f"{sparkline(times, 12, self._bars)} {duration(times[-1])} a round"
        lines = [sent, pace] if narrow else [f"{sent}    {pace}"]
        return self._panel(map(self._text, lines), "sent in this run, time")

    def _events(self, rows: int) -> Panel:
        latest = list(self._state.events)[-rows:] if rows > 0 else []
        lines = [
            self._text(_one_line(f"round {number}: {event.replace('_', ' ')}: {participant}: {reason}"), "yellow")
            for number, participant, event, reason in reversed(latest)
        ]
        return self._panel(lines or [self._text("none", "dim")], "events, latest first")

    def _panel(self, rows: Iterable[Text], title: str) -> Panel:
        return Panel(Group(*rows), title=self._text(title), title_align="left", padding=(0, 1))

    def _text(self, content: str, style: str = "") -> Text:
        # rich's own ellipsis cannot be written where only ASCII can
        return Text(content, style=style, no_wrap=True, overflow="crop" if self._ascii else "ellipsis")


def chosen_curves(curves: Sequence[_CurveKey], rows: int) -> Mapping[tuple[str, str], list[_CurveKey]]:
    """Curves (participant, kind, metric) by participant and kind, as many as there are rows for with a heading each.

    Of every participant and kind the first metrics come before the later ones of any; tests stand first, then the
    server, then the main metrics of tasks.
    """

    def order(key: _CurveKey) -> tuple[int, bool, bool]:
        participant, kind, metric = key
        return _KINDS.index(kind) if kind in _KINDS else len(_KINDS), participant != SERVER, metric not in PREFERRED

    groups: dict[tuple[str, str], list[_CurveKey]] = {}
    for key in sorted(curves, key=order):
        groups.setdefault(key[:2], []).append(key)
    places = sorted((place, number) for number, keys in enumerate(groups.values()) for place in range(len(keys)))
    counts: Counter[int] = Counter()
    for _, number in places:
        rows -= 1 if counts[number] else 2
        if rows < 0:
            break
        counts[number] += 1
    chosen = {group: keys[: counts[number]] for number, (group, keys) in enumerate(groups.items())}
    return {group: keys for group, keys in chosen.items() if keys}


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """A course in at most ``width`` characters, its lowest value as the first of ``bars``, its highest as the last.

    A longer course is averaged in pieces of nearly equal length; a piece without a finite value is a question mark.
    """
    count = max(0, min(width, len(values)))
    ends = [k * len(values) // max(1, count) for k in range(count + 1)]
    means = [_finite_mean(values[start:end]) for start, end in pairwise(ends)]
    low, high = min(_finite(means), default=0.0), max(_finite(means), default=0.0)
    top = len(bars) - 1
    heights = [(mean - low) / (high - low) * top if high > low else top // 2 + 0.0 * mean for mean in means]
    return "".join("?" if math.isnan(height) else bars[round(height)] for height in heights)


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _finite_mean(values: Sequence[float]) -> float:
    finite = _finite(values)
    return sum(finite) / len(finite) if finite else math.nan


def _change(course: Sequence[float]) -> str:
    return f"{course[-1] - course[-2]:+.2f}" if len(course) > 1 and math.isfinite(course[-1] - course[-2]) else ""


def _right_aligned(texts: Iterable[str]) -> list[str]:
    cells = list(texts)
    return [cell.rjust(max(map(len, cells))) for cell in cells]


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
