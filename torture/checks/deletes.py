"""Did a delete remove both the record and the files?"""

from collections.abc import Iterator, Mapping, Sequence

from torture.cases import Case
from torture.history import History

Found = Iterator[tuple[str, str]]


def deleted_jobs_leave_no_files(history: History, cases: Mapping[str, Case]) -> Found:
    """D7: after `deleted` no file of the job is left; nor of any deleted job when all is at rest."""
    for case in cases.values():
        for call in case.called("delete"):
            if call.left:
                yield case.job, f"call {call.n} was told that it is deleted, and there was {_some(call.left)}"
    for job, files in history.files.items():
        if files and job in cases and cases[job].called("delete"):
            yield job, f"it was deleted, and at the end there is {_some(files)}"


def deletes_are_finished(history: History, cases: Mapping[str, Case]) -> Found:
    """D7, J15: a delete that was answered is carried out, also if the server that answered was killed."""
    for case in cases.values():
        for call in case.called("delete") if case.record is not None else ():
            if call.answer == "ok":
                yield case.job, f"call {call.n} was answered {call.outcome}, and the job is still there at the end"


def _some(files: Sequence[str]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


RULES = (deleted_jobs_leave_no_files, deletes_are_finished)
