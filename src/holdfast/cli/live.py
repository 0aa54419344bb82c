"""The live view of `watch`."""

from collections import deque

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from holdfast.cli import render
from holdfast.cli.terminal import visible, visible_line
from holdfast.model import Event, Job, Status

TAIL = 15


class LiveView:
    """The state that `watch` shows, built from the job's events."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._status = job.status
        self._attempt = job.attempt
        self._progress: dict[str, object] = dict(job.progress or {})
        self._lines: deque[Text] = deque(maxlen=TAIL)
        self._note = ""
        self._tasks: dict[str, str] = {}

    def hear(self, event: Event) -> None:
        match event.type:
            case "log":
                style = "red" if event.data["stream"] == "stderr" else ""
                self._lines.extend(_log_line(line, style) for line in event.data["lines"][-TAIL:])
            case "status":
                self._status = Status(event.data["status"])
                self._attempt = event.data.get("attempt", self._attempt)
            case "progress":
                self._progress = dict(event.data)
            case "task" if event.task is not None:
                self._tasks[event.task] = "cached" if event.data.get("cached") else event.data["status"]
            case "task":
                self._tasks = dict.fromkeys(event.data["tasks"], "pending")
            case _:
                self._note = visible(render.event_line(event) or "")

    def picture(self) -> RenderableType:
        head = f"[bold]{self._job.id}[/]  {render.coloured(self._status)}  attempt {self._attempt}"
        parts: list[RenderableType] = [Text.from_markup(head)]
        percent = self._progress.get("percent")
        if isinstance(percent, int | float):
            parts.append(ProgressBar(total=100, completed=float(percent), width=40))
        if self._progress.get("message"):
            parts.append(Text(visible(str(self._progress["message"]))))
        if self._tasks:
            parts.append(Text(visible("  ".join(f"{name}: {status}" for name, status in self._tasks.items()))))
        if self._note:
            parts.append(Text(self._note, style="dim"))
        return Group(*parts, *self._lines)


def _log_line(line: str, style: str) -> Text:
    text = Text.from_ansi(visible_line(line[:500]))
    text.style = style
    return text
