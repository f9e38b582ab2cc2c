"""What a run looks like on a terminal of any size: metrics, cohort, traffic, time and events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING

from polyfed.reporting.run_state import ClientState, RunState
from polyfed.reporting.tables import duration, figure, mib
from polyfed.reporting.wording import PREPARING, doing_in_a_line, ticking
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.layout import Layout
    from rich.text import Text

Curve = tuple[str, str, str]
_SIDE_BY_SIDE = 76  # columns; narrower screens have the cohort below the metrics
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_SIGNS = {"waiting": "·", "working": "▶", "done": "✓", "excluded": "✗"}
_ASCII_SIGNS = {"waiting": ".", "working": ">", "done": "+", "excluded": "x"}
_STYLES = {"waiting": "dim", "working": "yellow", "done": "green", "excluded": "bold red"}
_MAIN = ("r1_sum", "accuracy")
_KINDS = ("test", "validation", "train")


class Picture:
    """Draws a state into whatever room it is given.

    Args:
        state: what is drawn.
        lock: held while the state is read.
    """

    def __init__(self, state: RunState, lock: RLock | None = None) -> None:
        self._state = state
        self._lock = lock or RLock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        height = options.height or console.height
        with self._lock:
            layout = _Painter(self._state, options.max_width, options.ascii_only).layout(height)
        yield layout


class _Painter:
    """One picture: everything is text when it is done, so the state may change while it is printed."""

    def __init__(self, state: RunState, width: int, ascii_only: bool) -> None:
        self._state = state
        self._width = width
        self._ascii = ascii_only
        self._bars = _ASCII_BARS if ascii_only else _BARS
        self._signs = _ASCII_SIGNS if ascii_only else _SIGNS
        self._arrows = ("up", "down") if ascii_only else ("↑", "↓")

    def layout(self, height: int) -> Layout:
        """Header, metrics and cohort, traffic and time, events: the first that fit."""
        from rich.layout import Layout

        whole = Layout()
        rows = [Layout(self._header(), size=min(3, height))]
        left = height - 3
        foot = [(self._traffic(), 4 if self._narrow else 3)] if left >= 12 else []
        events = min(8, (left - 9) // 3 + 2, max(1, len(self._state.events)) + 2) if left >= 14 else 0
        middle = left - sum(size for _, size in foot) - events
        if middle >= 3:
            rows.append(self._middle(middle))
        rows += [Layout(panel, size=size) for panel, size in foot]
        if events:
            rows.append(Layout(self._events(events - 2), size=events))
        whole.split_column(*rows)
        return whole

    @property
    def _narrow(self) -> bool:
        return self._width < _SIDE_BY_SIDE

    def _middle(self, height: int) -> Layout:
        from rich.layout import Layout

        middle = Layout(size=height)
        if not self._narrow:
            half = (self._width + 1) // 2
            middle.split_row(Layout(self._metrics(height - 2, half - 4), size=half), Layout(self._cohort(height - 2)))
        elif height >= 8:
            upper = height // 2
            middle.split_column(
                Layout(self._metrics(upper - 2, self._width - 4), size=upper),
                Layout(self._cohort(height - upper - 2)),
            )
        else:
            middle.update(self._cohort(height - 2))
        return middle

    # ---- header

    def _header(self) -> RenderableType:
        state = self._state
        total = f" of {state.rounds}" if state.rounds else ""
        begun = f"round {state.round}{total}" if state.round else doing_in_a_line(state, PREPARING, SERVER)
        what = "finished" if state.finished else begun or "not begun"
        room = max(0, min(30, self._width - 60))
        bar = self._bar(state.share, room) + "  " if state.rounds and room else ""
        time = f"  {ticking(state.elapsed)} elapsed" if state.elapsed else ""
        left = "" if state.finished or state.left is None else f", about {ticking(state.left)} left"
        line = self._text(f"{bar}{what}{time}{left}", "bold")
        return self._panel([line], plain(state.name) or "polyfed")

    def _bar(self, share: float, width: int) -> str:
        full = round(min(1.0, share) * width)
        return self._bars[-1] * full + self._bars[0] * (width - full)

    # ---- metrics

    def _metrics(self, rows: int, width: int) -> RenderableType:
        known = {key: curve.by_round() for key, curve in self._state.curves.items()}
        chosen = chosen_curves(list(known), rows)
        if not chosen:
            return self._panel([self._text("nothing is measured yet", "dim")], "metrics")
        courses = {key: list(known[key].values()) for keys in chosen.values() for key in keys}
        values = {key: figure(course[-1]) for key, course in courses.items()}
        changes = {key: _change(course) for key, course in courses.items()}
        figures = [f" {values[key]:>{_widest(values)}} {changes[key]:>{_widest(changes)}}" for key in courses]
        name, room = self._columns(courses, width - len(figures[0]))
        lines = {
            key: self._text(f" {self._short(plain(key[2]), name):{name}} ")
            .append(f"{sparkline(course, room, self._bars):{room}}", "cyan")
            .append(text)
            for (key, course), text in zip(courses.items(), figures, strict=True)
        }
        parts: list[Text] = []
        for (participant, kind), keys in chosen.items():
            total = sum(key[:2] == (participant, kind) for key in known)
            some = "" if len(keys) == total else f" ({len(keys)} of {total})"
            parts += [self._text(plain(f"{participant} {kind}") + some, "bold"), *(lines[key] for key in keys)]
        return self._panel(parts, "metrics: last and change")

    def _columns(self, courses: Mapping[Curve, Sequence[float]], width: int) -> tuple[int, int]:
        """Widths of names and sparklines: names whole if the lines still have some room."""
        rounds = max(map(len, courses.values()))
        name = max(1, min(max(len(plain(key[2])) for key in courses), width - 2 - min(8, rounds)))
        return name, max(0, min(40, rounds, width - 2 - name))

    def _short(self, text: str, width: int) -> str:
        """Cut in its middle: names of metrics differ at their ends."""
        if len(text) <= width:
            return text
        tail = width // 2
        return text[: width - tail - 1] + ("~" if self._ascii else "…") + text[len(text) - tail :]

    # ---- cohort

    def _cohort(self, rows: int) -> RenderableType:
        state = self._state
        counts = Counter(client.status for client in state.clients.values())
        part = [f"round {state.round}", plain(state.step)] if state.round else ["no round yet"]
        if state.clients:
            part.append(f"{counts['done']}/{len(state.clients)} done")
        if counts["excluded"]:
            part.append(f"{counts['excluded']} excluded")
        return self._panel(self._client_rows(max(0, rows)), "  ".join(filter(None, part)))

    def _client_rows(self, rows: int) -> list[Text]:
        state = self._state
        server = doing_in_a_line(state, SERVER, PREPARING) if state.round and rows > 1 else ""
        if server:
            line = self._text(f"{self._signs['working']} {plain(server)}", _STYLES["working"])
            return [line, *self._cohort_rows(rows - 1)]
        return self._cohort_rows(rows)

    def _cohort_rows(self, rows: int) -> list[Text]:
        state = self._state
        if not state.clients:
            known = f"{state.total_clients:,} clients, " if state.total_clients else ""
            return [self._text(f"{known}no cohort yet", "dim")]
        if len(state.clients) <= rows:
            return [self._client(client, found) for client, found in state.clients.items()]
        summary = self._groups(rows // 2)
        noteworthy = sorted(state.clients.items(), key=lambda item: self._noteworthiness(item[1]))
        return summary + [self._client(client, found) for client, found in noteworthy[: rows - len(summary)]]

    def _groups(self, rows: int) -> list[Text]:
        """A line a group; nothing if there is room for none but a line that says how many there are."""
        groups = self._state.groups()
        shown = list(groups) if len(groups) <= rows else list(groups)[: max(0, rows - 1)]
        more = f"... {len(groups) - len(shown)} more groups"
        rest = [self._text(more, "dim")] if shown and len(shown) < len(groups) else []
        return [self._group(name, groups[name]) for name in shown] + rest

    def _noteworthiness(self, client: ClientState) -> tuple[int, float]:
        """The excluded first, then who works longest, then who took longest."""
        order = ("excluded", "working", "done", "waiting").index(client.status)
        return order, -(self._state.working_for(client) if client.status == "working" else client.seconds)

    def _group(self, name: str, clients: Mapping[str, ClientState]) -> Text:
        counts = Counter(client.status for client in clients.values())
        others = [f"{counts[status]} {status}" for status in ("working", "excluded") if counts[status]]
        line = f"{plain(name)}: " + ", ".join([f"{counts['done']}/{len(clients)} done", *others])
        return self._text(line, "bold red" if counts["excluded"] else "bold")

    def _client(self, client: str, state: ClientState) -> Text:
        what = {
            "waiting": "waiting",
            "working": f"{state.step} {ticking(self._state.working_for(state))}{_percent(state.share)}",
            "done": duration(state.seconds),
            "excluded": state.reason or "excluded",
        }[state.status]
        return self._text(f"{self._signs[state.status]} {plain(client)}  {plain(what)}", _STYLES[state.status])

    # ---- traffic, time, events

    def _traffic(self) -> RenderableType:
        state = self._state
        up, down = state.bytes
        last_up, last_down = state.sent[max(state.sent)] if state.sent else (0, 0)
        arrow_up, arrow_down = self._arrows
        sent = f"{arrow_up} {mib(up)}  {arrow_down} {mib(down)} MiB"
        latest = f"(last round {mib(last_up)}, {mib(last_down)})" if state.sent else ""
        times = [state.seconds[number] for number in sorted(state.seconds)]
        pace = f"{sparkline(times, 12, self._bars)} {duration(times[-1])} a round" if times else ""
        if self._narrow:
            return self._panel([self._text(f"{sent}  {latest}"), self._text(pace)], "sent in this run, time")
        return self._panel([self._text(f"{sent}  {latest}    {pace}")], "sent in this run, time")

    def _events(self, rows: int) -> RenderableType:
        latest = list(self._state.events)[-rows:] if rows > 0 else []
        lines = [
            self._text(plain(f"round {number}: {event.replace('_', ' ')}: {participant}: {reason}"), "yellow")
            for number, participant, event, reason in reversed(latest)
        ]
        return self._panel(lines or [self._text("none", "dim")], "events, latest first")

    def _panel(self, rows: Sequence[Text], title: str) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel

        return Panel(Group(*rows), title=self._text(title), title_align="left", padding=(0, 1))

    def _text(self, content: str, style: str = "") -> Text:
        from rich.text import Text

        # rich's own ellipsis cannot be written where only ASCII can
        return Text(content, style=style, no_wrap=True, overflow="crop" if self._ascii else "ellipsis")


def chosen_curves(known: Sequence[Curve], rows: int) -> dict[tuple[str, str], list[Curve]]:
    """Curves (participant, kind, metric) by participant and kind, as many as there are rows for with a heading each.

    Of every participant and kind the first metrics come before the later ones of any; tests stand first, then the
    server, then the main metrics of tasks.
    """

    def order(key: Curve) -> tuple[int, bool, bool]:
        participant, kind, metric = key
        return _KINDS.index(kind) if kind in _KINDS else len(_KINDS), participant != SERVER, metric not in _MAIN

    groups: dict[tuple[str, str], list[Curve]] = {}
    for key in sorted(known, key=order):
        groups.setdefault(key[:2], []).append(key)
    chosen: dict[tuple[str, str], list[Curve]] = {}
    for _, group, key in sorted(
        ((place, group, key) for group, keys in groups.items() for place, key in enumerate(keys)),
        key=lambda item: item[0],
    ):
        rows -= 1 if group in chosen else 2
        if rows < 0:
            break
        chosen.setdefault(group, []).append(key)
    return {group: chosen[group] for group in groups if group in chosen}


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """A course in at most ``width`` characters, its lowest value as the first of ``bars``, its highest as the last.

    A longer course is averaged in pieces of nearly equal length; a piece without a finite value is a question mark.
    """
    if width <= 0 or not values:
        return ""
    count = min(width, len(values))
    pieces = [values[k * len(values) // count : (k + 1) * len(values) // count] for k in range(count)]
    means = [_mean([value for value in piece if math.isfinite(value)]) for piece in pieces]
    finite = [mean for mean in means if not math.isnan(mean)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0))
    top = len(bars) - 1
    return "".join(
        "?" if math.isnan(mean) else bars[round((mean - low) / span * top) if span > 0 else top // 2] for mean in means
    )


def plain(text: str) -> str:
    """On one line and without control characters: ids and reasons come from clients, the terminal is ours."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _change(course: Sequence[float]) -> str:
    return f"{course[-1] - course[-2]:+.2f}" if len(course) > 1 and math.isfinite(course[-1] - course[-2]) else ""


def _percent(share: float) -> str:
    return f"  {share:.0%}" if share else ""


def _widest(texts: Mapping[Curve, str]) -> int:
    return max(map(len, texts.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
