"""docs/performance.md and its picture, from the numbers of a run. Nothing is written that was not measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.adapters import PEERS
from bench.peers.bars import Panel, number, svg
from bench.peers.peer import Keeper
from bench.peers.results import Figure, Results, figure, paired

TEMPLATE = Path(__file__).parent / "performance.md.in"
PICTURE = "performance.svg"
NUMBERS = "performance.json"
OURS = "holdfast"


@dataclass(frozen=True)
class Column:
    title: str
    part: str
    measure: str
    unit: str = ""


@dataclass(frozen=True)
class Ratio:
    """One measure of one peer over another, taken in the same rounds."""

    title: str
    part: str
    over: tuple[str, str]
    under: tuple[str, str]


SUBMIT = (Column("bulk of 10,000", "submit", "bulk", "jobs/s"), Column("one at a time", "submit", "single", "jobs/s"))
DRAIN = tuple(Column(f"{n} worker{'s' * (n > 1)}", "drain", f"rate_{n}", "jobs/s") for n in (1, 2, 4))
COST = (
    Column("CPU of the worker", "drain", "worker_us", "µs/job"),
    Column("CPU of the database", "drain", "store_us", "µs/job"),
    Column("memory", "drain", "memory_mb", "MB"),
)
PICKUP = (Column("p50", "pickup", "p50", "ms"), Column("p99", "pickup", "p99", "ms"))
PACED = (("jobs/s", "rate_before", "rate_after"), ("p50 ms", "p50_before_ms", "p50_after_ms"))
RATIOS = (
    Ratio("drain, 1 worker: holdfast / Graphile Worker", "drain", (OURS, "rate_1"), ("graphile", "rate_1")),
    Ratio("drain, 1 worker: holdfast / pg-boss", "drain", (OURS, "rate_1"), ("pgboss", "rate_1")),
    Ratio("drain, 1 worker: holdfast / PgQueuer", "drain", (OURS, "rate_1"), ("pgqueuer", "rate_1")),
    Ratio("drain, 1 worker: holdfast / plain SQL", "drain", (OURS, "rate_1"), ("raw", "rate_1")),
    Ratio("drain: holdfast with 2 workers / with 1", "drain", (OURS, "rate_2"), (OURS, "rate_1")),
    Ratio("drain, 2 workers: holdfast / Graphile Worker", "drain", (OURS, "rate_2"), ("graphile", "rate_2")),
    Ratio("drain, SQLite: holdfast / Huey", "drain", ("holdfast-sqlite", "rate_1"), ("huey", "rate_1")),
    Ratio("bulk submit: holdfast / Graphile Worker", "submit", (OURS, "bulk"), ("graphile", "bulk")),
    Ratio("bulk submit, SQLite: holdfast / Huey", "submit", ("holdfast-sqlite", "bulk"), ("huey", "bulk")),
    Ratio("pickup p50: holdfast / bare NOTIFY and claim", "pickup", (OURS, "p50"), ("raw", "p50")),
    Ratio("pickup p99: holdfast / bare NOTIFY and claim", "pickup", (OURS, "p99"), ("raw", "p99")),
    Ratio(
        "store, claim 100 and finish 100 over 2 connections: holdfast / raw SQL",
        "references", (OURS, "store_work"), ("raw", "store_work"),
    ),
    Ratio(
        "single submit over HTTP: holdfast / a constant answer",
        "references", (OURS, "http_submit"), (OURS, "http_constant"),
    ),
    Ratio("store, claim of 100: in the crowd / alone", "depth", (OURS, "claim_crowd_ms"), (OURS, "claim_alone_ms")),
    Ratio("store, 400 jobs/s: claim p50 after 150 s under an old transaction / before",
          "paced", (OURS, "claim_after_ms"), (OURS, "claim_before_ms")),
    Ratio("store, 400 jobs/s: rate after 150 s under an old transaction / before",
          "paced", (OURS, "claimed_after"), (OURS, "claimed_before")),
)  # fmt: skip


def shown(found: Figure | None) -> str:
    """A median and its range."""
    if found is None:
        return "–"
    if found.lowest == found.highest:
        return number(found.median)
    return f"{number(found.median)} ({number(found.lowest)}–{number(found.highest)})"


def ratio(found: Figure | None) -> str:
    if found is None:
        return "–"
    return f"**{found.median:.2f}** ({found.lowest:.2f}–{found.highest:.2f})"


def table(results: Results, columns: Sequence[Column]) -> list[str]:
    """A row per peer that was measured; one that was not is named below the table."""
    heads = [f"{column.title}, {column.unit}" if column.unit else column.title for column in columns]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(columns)]
    for name, peer in PEERS.items():
        cells = [shown(figure(results.values(column.part, name, column.measure))) for column in columns]
        if set(cells) != {"–"}:
            lines.append(f"| {peer.name} | " + " | ".join(cells) + " |")
    return [*lines, "", *broken(results, columns[0].part)]


def broken(results: Results, part: str) -> list[str]:
    failed = results.parts[part].failed if part in results.parts else {}
    lines = [f"{PEERS[name].name} broke in this part: {reason}." for name, reason in sorted(failed.items())]
    return [line for pair in ((line, "") for line in lines) for line in pair]


def before_and_after(results: Results, part: str, measures: Sequence[tuple[str, str, str]]) -> list[str]:
    """A row per peer, with two values and their ratio for each measure."""
    heads = " | ".join(f"{title} before | after | after / before" for title, _, _ in measures)
    lines = [f"| | {heads} |", "| --- |" + " --- |" * 3 * len(measures)]
    for name, peer in PEERS.items():
        cells: list[str] = []
        for _, before, after in measures:
            first, second = results.values(part, name, before), results.values(part, name, after)
            cells += [shown(figure(first)), shown(figure(second)), ratio(paired(second, first))]
        if set(cells) != {"–"}:
            lines.append(f"| {peer.name} | " + " | ".join(cells) + " |")
    return [*lines, "", *broken(results, part)]


def ratios(results: Results) -> list[str]:
    lines = ["| | ratio |", "| --- | --- |"]
    for wanted in RATIOS:
        over, under = (results.values(wanted.part, *side) for side in (wanted.over, wanted.under))
        lines.append(f"| {wanted.title} | {ratio(paired(over, under))} |")
    return [*lines, ""]


def conditions(results: Results) -> list[str]:
    lines = ["| part | taken | jobs | rounds | load before |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {part.taken_at} | {part.jobs:,} | {part.rounds} | {part.load} |"
        for name, part in results.parts.items()
    ]
    return [*lines, ""]


def peers(results: Results) -> list[str]:
    lines = [
        "| | versions | configuration | kept of a job that succeeded | jobs in a drain |",
        "| --- |" + " --- |" * 4,
    ]
    for name, peer in PEERS.items():
        if name in results.versions:
            versions = ", ".join(f"{package} {version}" for package, version in results.versions[name].items())
            share = "all" if peer.share == 1 else f"{peer.share:.0%}"
            lines.append(f"| {peer.name} | {versions} | {peer.configuration} | {peer.keeps} | {share} |")
    lines += [
        "",
        *(f"**{PEERS[name].name} is missing**: {reason}." for name, reason in sorted(results.missing.items())),
    ]
    return [*lines, ""]


def kept(results: Results) -> list[str]:
    if "drain" not in results.parts:
        return []
    lines = ["| | counted after its last drain |", "| --- | --- |"]
    for name, peer in PEERS.items():
        counted = results.parts["drain"].kept.get(name)
        if counted is not None:
            counts = ", ".join(f"{count:,} {what}" for what, count in counted.items()) or "no job is left"
            lines.append(f"| {peer.name} | {counts} |")
    return [*lines, ""]


def panels(results: Results) -> list[Panel]:
    """The picture: what can be compared at a glance."""
    wanted = (*DRAIN[:2], SUBMIT[0], PICKUP[0])
    titles = (
        "Drain, 1 worker: jobs/s",
        "Drain, 2 workers: jobs/s",
        "Bulk submit: jobs/s",
        "Pickup p50: ms, less is better",
    )
    drawn = []
    for column, title in zip(wanted, titles, strict=True):
        found = [
            (peer.name, values, name.startswith(OURS))
            for name, peer in PEERS.items()
            if (values := figure(results.values(column.part, name, column.measure))) is not None
        ]
        if found:
            drawn.append(Panel(title, found))
    return drawn


def picture(results: Results) -> str:
    return svg(panels(results))


def page(results: Results) -> str:
    return TEMPLATE.read_text().format(
        machine="; ".join(f"{what}: {value}" for what, value in results.machine.items()),
        lanes=", ".join(peer.name for peer in PEERS.values() if peer.lanes and peer.keeper is Keeper.POSTGRES),
        no_crowd="; ".join(f"{peer.name} ({peer.no_crowd})" for peer in PEERS.values() if peer.no_crowd) + ".",
        conditions=_text(conditions(results)),
        ratios=_text(ratios(results)),
        submit=_text(table(results, SUBMIT)),
        drain=_text(table(results, DRAIN)),
        cost=_text(table(results, COST)),
        pickup=_text(table(results, PICKUP)),
        depth=_text(before_and_after(results, "depth", [("jobs/s", "alone", "crowd")])),
        pinned=_text(before_and_after(results, "pinned", [("jobs/s", "before", "after")])),
        paced=_text(before_and_after(results, "paced", PACED)),
        peers=_text(peers(results)),
        kept=_text(kept(results)).rstrip(),
    )


def _text(lines: list[str]) -> str:
    return "\n".join(lines)
