"""A job's timeline from all sources, in order of time; printed with a violation."""

from torture.cases import Case

Told = tuple[float, str, str]


def timeline(case: Case) -> str:
    """Return a line for each thing that happened."""
    entries: list[Told] = [*_calls(case), *_children(case), *_record(case), *_faults(case)]
    if not entries:
        return f"  nobody but the caller has heard of job {case.job}"
    begin = min(at for at, _, _ in entries)
    head = [f"  job {case.job}: {case.record}" if case.record else f"  job {case.job} is not in the database"]
    return "\n".join(head + [f"  {at - begin:9.3f}  {who:<8} {what}" for at, who, what in sorted(entries)])


def _calls(case: Case) -> list[Told]:
    entries: list[Told] = []
    for call in case.calls:
        entries.append((call.sent, "caller", f"{call.verb} #{call.n} {'key ' + call.key if call.key else ''}"))
        entries.append((call.answered, "caller", f"  answer to #{call.n}: {call.answer} {call.error}"))
    for follow in case.follows:
        seqs = [seq for seq, _ in follow.events]
        span = f"{seqs[0]}..{seqs[-1]}" if seqs else "nothing"
        entries.append((0.0, "follower", f"after {follow.after}: {span}{', to the end' if follow.ended else ', cut'}"))
    return [(at or min(at for at, _, _ in entries if at), who, what) for at, who, what in entries if at or case.calls]


def _children(case: Case) -> list[Told]:
    """The first and the last line of each process, and how much was between."""
    entries: list[Told] = []
    for attempt, lines in case.runs.items():
        for line in lines:
            if line.what in ("start", "end") or line in (lines[0], lines[-1]):
                what = f"{line.what}, attempt {attempt}, token {line.token}, pid {line.pid}, said {line.said}"
                entries.append((line.at, "child", what))
    return entries


def _record(case: Case) -> list[Told]:
    entries = [
        (event.at, "record", f"[{event.seq}] {event.type} {event.data}") for event in case.events if event.type != "log"
    ]
    for row in case.attempts:
        entries.append(
            (row.ended, "ledger", f"attempt {row.attempt} ended: {row.cause}, {row.status}, token {row.token}")
        )
    return entries


def _faults(case: Case) -> list[Told]:
    return [(fault.at, "fault", f"{fault.kind} {fault.target}") for fault in case.faults]
