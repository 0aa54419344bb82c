"""What callers do with jobs: release, stop, resume, resolve, dismiss, delete; `JobSubmit` submits, reads and lists."""

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from holdfast.budgets import raised_budget, refused_resume
from holdfast.errors import (
    Conflict,
    IllegalMove,
    JobNotEnded,
    NotFound,
    one_line,
)
from holdfast.model import TERMINAL, WAITING, Error, Gate, Job, Json, Status, StopKind, Verb
from holdfast.store import notify
from holdfast.store.after_moves import AfterMoves
from holdfast.store.audit import By, record
from holdfast.store.database import Database, Row, Tx
from holdfast.store.files import Files, NoFiles
from holdfast.store.gates import Gates, take_reuse_key
from holdfast.store.job_submit import JobSubmit
from holdfast.store.lanes import settle_lanes
from holdfast.store.outcomes import encoded_result
from holdfast.store.resume_checks import refuse_broken_needs, refuse_open_attempt, refuse_unstopped_attempt
from holdfast.store.rows import known_id, to_json
from holdfast.store.transitions import DecideMove, Move, Moved, audit, change_job, event, is_lost, lock_job

MAX_REASON = 1000
"""Characters of a caller's reason in the error message of a job; the audit event has all of it."""


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a stop request: the job ended now, its owner is stopping it, or there is nothing to do."""

    outcome: Literal["ended", "stopping", "already"]
    job: Job


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Literal["deleted", "deleting", "would_delete"]


class Jobs(JobSubmit):
    """Every operation on jobs that needs no lease."""

    def __init__(
        self, database: Database, gates: Gates, wake_up: notify.Notifications, defaults: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(database, gates, wake_up, defaults)
        self.after_moves = AfterMoves(database, gates, wake_up)
        self.files: Files = NoFiles()
        self._deleted_up_to: str | None = None
        """Where the next `finish_deletions` starts: a job that cannot be deleted yet must not block the others."""

    # Moving one job

    async def release(self, job_id: str, *, tenant: str = "default", by: By = None) -> Job:
        """Queue a job that was submitted with `hold`."""

        async def decide(_: Tx, row: Row) -> Move:
            return _queued(row, Verb.RELEASE, by, None)

        await self._change(Verb.RELEASE, tenant, job_id, decide)
        return await self.get(job_id, tenant=tenant)

    async def cancel(
        self, job_id: str, *, tenant: str = "default", by: By = None, reason: str | None = None
    ) -> Stopped:
        """End a waiting or paused job now; for a running one, record a durable request for its owner."""
        return await self._stop(Verb.CANCEL, StopKind.CANCEL, tenant, job_id, by, reason)

    async def interrupt(
        self, job_id: str, *, tenant: str = "default", by: By = None, reason: str | None = None
    ) -> Stopped:
        """Like cancel, but a running job ends `paused`, to be resumed."""
        return await self._stop(Verb.INTERRUPT, StopKind.INTERRUPT, tenant, job_id, by, reason)

    async def resume(
        self,
        job_id: str,
        *,
        tenant: str = "default",
        by: By = None,
        reason: str | None = None,
        budget: Mapping[str, float] | None = None,
        stopped: bool = False,
    ) -> Job:
        """Queue a job again that is paused, failed, timed out or cancelled, together with its dependants.

        `budget` sets new limits; the others stay. A job whose budget is spent is refused unless the new limits exceed
        its usage. `stopped` says that a person made sure that a lost attempt no longer runs.
        """

        async def decide(tx: Tx, row: Row) -> Move:
            if row["stop_kind"] == StopKind.DELETE:
                raise Conflict(f"cannot resume job {job_id}: it is being deleted")
            if row["phase"] is not None and not stopped:
                await refuse_open_attempt(tx, row)
            if row["status"] == Status.CANCELLED and not stopped:
                await refuse_unstopped_attempt(tx, row)
            await refuse_broken_needs(tx, row)
            if (spent := refused_resume(to_json(row["usage"], {}), to_json(row["budget"]), budget)) is not None:
                raise Conflict(f"cannot resume job {job_id}: {spent}")
            if row["reuse_key"] is not None:
                other = await take_reuse_key(tx, row)
                if other is not None:
                    raise Conflict(f"cannot resume job {job_id}: job {other} is live for its reuse key")
            if budget is not None:
                await tx.rows("set_budget", id=row["id"], budget=raised_budget(to_json(row["budget"]), budget))
            if budget is not None or stopped:
                before = {"status": row["status"], "budget": to_json(row["budget"])}
                after = {"budget": raised_budget(to_json(row["budget"]), budget or {}), "stopped": stopped}
                await record(tx, by, "job.resume", row["id"], tenant=tenant, before=before, after=after, reason=reason)
            return _queued(row, Verb.RESUME, by, reason)

        await self._change(Verb.RESUME, tenant, job_id, decide)
        return await self.get(job_id, tenant=tenant)

    async def resolve(
        self,
        job_id: str,
        result: Json = None,
        *,
        tenant: str = "default",
        by: By = None,
        reason: str | None = None,
    ) -> Job:
        """Mark a paused, failed or timed-out job as succeeded, with the result that a person gives."""
        encoded_result(result)

        async def decide(tx: Tx, row: Row) -> Move:
            before, after = {"status": row["status"]}, {"status": str(Status.SUCCEEDED)}
            await record(tx, by, "job.resolve", row["id"], tenant=tenant, before=before, after=after, reason=reason)
            return Move(
                status=Status.SUCCEEDED,
                result=result,
                stop_kind=row["stop_kind"],
                close_attempt=row["phase"] is not None,
                unsettle=True,
                events=[*audit(Verb.RESOLVE, by, reason), event("status", status="succeeded", resolved=True)],
            )

        await self._change(Verb.RESOLVE, tenant, job_id, decide)
        return await self.get(job_id, tenant=tenant)

    async def dismiss(self, job_id: str, *, tenant: str = "default", by: By = None, reason: str | None = None) -> Job:
        """Let the lane of a failed or timed-out job continue without it."""

        async def decide(tx: Tx, row: Row) -> Move | None:
            if row["dismissed"]:
                return None
            before = {"status": row["status"]}
            await record(tx, by, "job.dismiss", row["id"], tenant=tenant, before=before, reason=reason)
            events = audit(Verb.DISMISS, by, reason) or [event("audit", action="dismiss")]
            return Move(
                status=Status(row["status"]),
                dismissed=True,
                keep_error=True,
                stop_kind=row["stop_kind"],
                events=events,
            )

        await self._change(Verb.DISMISS, tenant, job_id, decide)
        return await self.get(job_id, tenant=tenant)

    async def delete(
        self,
        job_id: str,
        *,
        tenant: str = "default",
        force: bool = False,
        dry_run: bool = False,
        by: By = None,
        reason: str | None = None,
    ) -> Deletion:
        """Delete a job that has ended, with its files; with `force`, stop it first. A duty finishes what this cannot.

        The intent is recorded first, then the files are removed, and the record last. So `deleted` means that nothing
        is left, and `deleting` that a duty continues even if the caller goes away. `reason` says why the job is
        stopped; dependants that fail because of it show the reason.
        """
        job = await self.get(job_id, tenant=tenant)
        if job.status not in TERMINAL and not force:
            raise JobNotEnded(job_id, job.status)
        if dry_run:
            return Deletion(outcome="would_delete")
        try:
            if job.status not in TERMINAL:
                with contextlib.suppress(IllegalMove):  # The job ended between the two statements.
                    await self._stop(Verb.CANCEL, StopKind.DELETE, tenant, job_id, by, reason)
            if await self._request_deletion(tenant, job_id, by=by, force=force, reason=reason):
                return Deletion(outcome="deleted" if await self._remove(tenant, job_id) else "deleting")
            now = await self.get(job_id, tenant=tenant)
            if now.stop_request is not None and now.stop_request.kind is StopKind.DELETE:
                return Deletion(outcome="deleting")
            # The job was resumed between the two statements.
            return await self.delete(job_id, tenant=tenant, force=force, by=by, reason=reason)
        except NotFound:  # A duty or another caller deleted it first.
            return Deletion(outcome="deleted")

    # Duties

    async def finish_deletions(self, limit: int = 100) -> int:
        """Delete jobs that are marked for deletion and have ended, their files first; return how many."""
        deleting = await self._database.read("jobs_to_delete", after_id=self._deleted_up_to, limit=limit)
        self._deleted_up_to = deleting[-1]["id"] if len(deleting) == limit else None
        ended = {row["id"]: row["tenant"] for row in deleting if await self._ended(row)}
        for row in deleting:
            if row["blocking"]:  # The job ended by itself before the stop request was carried out.
                with contextlib.suppress(NotFound):
                    await self._request_deletion(row["tenant"], row["id"])
        gone = await self.files.remove(list(ended)) if ended else ()
        removed = 0
        for job_id in gone:
            removed += await self._delete_record(ended[job_id], job_id)
        return removed

    async def _ended(self, row: Row) -> bool:
        """End a paused job that is marked for deletion; False if a worker recovered its lost attempt meanwhile."""
        if row["status"] != Status.PAUSED:
            return True
        try:
            stopped = await self._stop(Verb.CANCEL, StopKind.DELETE, row["tenant"], row["id"], None, None)
        except (IllegalMove, NotFound):
            return False
        return stopped.job.status in TERMINAL

    async def expire(self, limit: int = 100) -> int:
        """End queued jobs whose queue timeout passed before their first claim; return how many."""
        overdue = await self._database.read("overdue_jobs", limit=limit)
        ended = 0
        for row in overdue:
            ended += await self._expire(row["tenant"], row["id"])
        return ended

    async def _expire(self, tenant: str, job_id: str) -> bool:
        async def decide(_: Tx, row: Row) -> Move | None:
            if not row["overdue"]:
                return None
            error = Error(code="queue_timeout", message="no worker claimed the job within its queue timeout")
            return Move(
                status=Status.TIMED_OUT,
                error=error,
                unsettle=True,
                events=[event("status", status="timed_out", code=error.code, message=error.message)],
            )

        try:
            moved = await self._change(Verb.EXPIRE, tenant, job_id, decide)
        except (Conflict, NotFound):
            return False
        return moved.status is Status.TIMED_OUT

    # Steps

    async def _change(self, verb: Verb, tenant: str, job_id: str, decide: DecideMove) -> Moved:
        moved = await change_job(self._database, verb, tenant, known_id(job_id), decide)
        await self.after_moves.moved(moved)
        return moved

    async def _stop(self, verb: Verb, kind: StopKind, tenant: str, job_id: str, by: By, reason: str | None) -> Stopped:
        outcome: Literal["ended", "stopping", "already"] = "already"
        why = one_line(reason, MAX_REASON) or None if reason else None

        async def decide(tx: Tx, row: Row) -> Move | None:
            nonlocal outcome
            outcome = "already"
            status = Status(row["status"])
            if status is Status.RUNNING or (kind is StopKind.INTERRUPT and is_lost(row)):
                outcome = "stopping" if status is Status.RUNNING else "already"
                before = None if row["stop_kind"] is None else StopKind(row["stop_kind"])
                if kind.escalates(before):
                    await _record_delete(tx, kind, row, by, reason)
                    events = [*audit(verb, by, reason), event("cancel", cancel="requested", kind=kind)]
                    await tx.rows("request_stop", id=row["id"], kind=kind, reason=why, events=events)
                return None
            if kind is StopKind.INTERRUPT and status is Status.PAUSED:
                return None
            if status is Status.CANCELLED and not kind.escalates(row["stop_kind"] and StopKind(row["stop_kind"])):
                return None
            if status is Status.CANCELLED and kind is not StopKind.DELETE:
                return None
            await _record_delete(tx, kind, row, by, reason)
            outcome = "ended"
            how = "cancelled before it started" if status in WAITING else "cancelled"
            error = Error(code="cancelled", message=f"{how}: {why}" if why else how)
            return Move(
                status=Status.CANCELLED,
                error=error,
                stop_kind=StopKind.DELETE if StopKind.DELETE in (kind, row["stop_kind"]) else None,
                close_attempt=row["phase"] is not None,
                unsettle=True,
                events=[
                    *audit(verb, by, reason),
                    event("status", status="cancelled", code=error.code, message=error.message),
                ],
            )

        await self._change(verb, tenant, job_id, decide)
        if outcome == "stopping":
            self._notifications.post([notify.STOP])
        return Stopped(outcome=outcome, job=await self.get(job_id, tenant=tenant))

    async def _request_deletion(
        self, tenant: str, job_id: str, *, by: By = None, force: bool = False, reason: str | None = None
    ) -> bool:
        """Mark a job for deletion and let its lane advance; False if the job has not ended, NotFound if it is gone."""

        async def change(tx: Tx) -> tuple[bool, frozenset[str]]:
            row = await lock_job(tx, tenant, known_id(job_id))
            deleting = bool(await tx.rows("request_deletion", id=row["id"], tenant=tenant))
            if deleting:
                await _record_delete(tx, StopKind.DELETE, row, by, reason, force=force)
            if not deleting or row["lane"] is None:
                return deleting, frozenset()
            return True, frozenset(await settle_lanes(tx, [(tenant, row["lane"])]))

        deleting, queues = await self._database.transact(change)
        self.after_moves.opened(queues)
        return deleting

    async def _remove(self, tenant: str, job_id: str) -> bool:
        """Remove the files of a job that is marked for deletion, then its record; False if that is not possible yet."""
        job_id = known_id(job_id)
        return job_id in await self.files.remove([job_id]) and await self._delete_record(tenant, job_id)

    async def _delete_record(self, tenant: str, job_id: str) -> bool:
        """Delete a job's rows after its dependants were settled; False if that is not possible yet."""

        async def change(tx: Tx) -> tuple[bool, frozenset[str]]:
            row = await lock_job(tx, tenant, job_id)
            gone = await tx.rows("delete_jobs", ids=[row["id"]])
            lane = row["lane"]
            if not gone or lane is None:
                return bool(gone), frozenset()
            return True, frozenset(await settle_lanes(tx, [(tenant, lane)]))

        await self._gates.follow_up(settle=[job_id])
        try:
            gone, queues = await self._database.transact(change)
        except NotFound:
            return True
        self.after_moves.opened(queues)
        return gone


async def _record_delete(tx: Tx, kind: StopKind, row: Row, by: By, reason: str | None, *, force: bool = True) -> None:
    """Record the decision to delete a job in the audit trail once; the duty that carries it out adds no second row."""
    if kind is StopKind.DELETE and row["stop_kind"] != StopKind.DELETE:
        before, after = {"status": row["status"]}, {"force": force}
        await record(tx, by, "job.delete", row["id"], tenant=row["tenant"], before=before, after=after, reason=reason)


def _queued(row: Row, verb: Verb, by: By, reason: str | None) -> Move:
    """Return the move that queues a job again, with one more attempt allowed."""
    closing = row["phase"] is not None
    if row["lane"] is not None or row["has_needs"]:
        gate = Gate.UNRESOLVED
    else:
        gate = Gate.FUTURE if row["delayed"] else Gate.OPEN
    return Move(
        status=Status.QUEUED,
        gate=gate,
        keep_error=True,
        close_attempt=closing,
        max_attempts=row["spent"] + int(closing) + 1,
        queue_timeout=row["queue_timeout"] if row["started_at"] is None else None,
        unsettle=verb is Verb.RESUME,
        events=[*audit(verb, by, reason), event("status", status="queued", by=str(verb))],
    )
