"""What callers do with jobs: submit, read, list, release, stop, resume, resolve, dismiss, delete."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import msgspec

from holdfast.budgets import raised_budget, refusal
from holdfast.errors import (
    Blocked,
    Conflict,
    Gone,
    IllegalMove,
    Invalid,
    NeedFailed,
    NotFound,
    QueueFull,
    StoreError,
    one_line,
)
from holdfast.model import BROKEN, TERMINAL, WAITING, Error, Gate, Job, Json, Status, StopKind, Verb
from holdfast.store import notify
from holdfast.store.audit import By, record
from holdfast.store.database import Database, Row, Tx
from holdfast.store.error_mapping import id_taken, id_unusable
from holdfast.store.files import Files, NoFiles
from holdfast.store.gates import Gates, take_reuse_key
from holdfast.store.lanes import settle_lanes
from holdfast.store.listing import Filters, JobPage, list_jobs
from holdfast.store.outcomes import encoded_result
from holdfast.store.rows import known_id, to_job, to_json
from holdfast.store.transitions import DecideMove, Move, Moved, audit, change_job, event, is_lost, lock_job
from holdfast.submission import QUEUE, Accepted, Batch, Submission, gather

ID_DIGITS = 32
QUEUES_SECONDS = 1.0
FEW = 64
"""Batches up to this size are checked on the event loop; a larger one would block every other request."""
MAX_REASON = 1000
"""Characters of a caller's reason in the error message of a job; the audit event has all of it."""


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a stop request: the job ended now, its owner is stopping it, or there is nothing to do."""

    outcome: Literal["ended", "stopping", "already"]
    job: Job


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Literal["deleted", "deleting", "would_delete"]


async def _gathered(
    jobs: Sequence[Submission | Mapping[str, Any]],
    tenant: str,
    key: str | None,
    sent: Sequence[Any] | None,
    defaults: Mapping[str, Any],
) -> Batch:
    if len(jobs) <= FEW:
        return gather(jobs, tenant, key, sent, defaults)
    return await asyncio.to_thread(gather, jobs, tenant, key, sent, defaults)


class Jobs:
    def __init__(
        self, database: Database, gates: Gates, wake_up: notify.Notifications, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.defaults = dict(defaults or {})
        """Values from this process's settings for fields that a job leaves out."""
        self._function_queues: Mapping[str, str] = {}
        self._function_queues_until = 0.0
        self._database = database
        self._gates = gates
        self._notifications = wake_up
        self.files: Files = NoFiles()
        self._deleted_up_to: str | None = None
        """Where the next `finish_deletions` starts: a job that cannot be deleted yet must not block the others."""

    # Submitting and reading

    async def submit(
        self,
        job: Submission | Mapping[str, Any],
        *,
        tenant: str = "default",
        key: str | None = None,
        sent: Sequence[Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Job:
        """Accept one job: when this returns, it is in the database. An existing job is returned as `reused`.

        `defaults` apply to fields that neither the job nor the registered defaults of its function set.
        """
        (accepted,) = await self.accept([job], tenant=tenant, key=key, sent=sent, defaults=defaults)
        job_now = await self.get(accepted.id, tenant=tenant)
        return msgspec.structs.replace(job_now, reused=accepted.reused)

    async def submit_many(
        self, jobs: Sequence[Submission | Mapping[str, Any]], *, tenant: str = "default", key: str | None = None
    ) -> Sequence[str]:
        """Accept many jobs in one transaction, all or none; return their ids in the order given."""
        return [accepted.id for accepted in await self.accept(jobs, tenant=tenant, key=key)]

    async def accept(
        self,
        jobs: Sequence[Submission | Mapping[str, Any]],
        *,
        tenant: str = "default",
        key: str | None = None,
        sent: Sequence[Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Sequence[Accepted]:
        """Accept many jobs in one transaction, all or none.

        `key` is an idempotency key: for 24 hours, the same call with the same key returns the same ids. If the jobs
        were built from a request, `sent` is that request, and calls are compared by it.
        """
        batch = await _gathered(jobs, tenant, key, sent, {**self.defaults, **(defaults or {})})
        try:
            existing = await self._database.submit(batch)
        except (Gone, NeedFailed, QueueFull):
            raise
        except Conflict:
            await self.refuse_taken_ids(batch)
            raise
        answer = batch.answer(existing)
        if existing and existing[0]["asked"] is None:
            return answer
        # A job with a priority, or with an id that the caller chose, may sort before jobs that already wait.
        sorts_first = any(job.priority for job in batch.jobs) or any(_given_id(job) for job in jobs)
        self._notifications.post(
            {notify.work(queue) for queue in await self._queues_of(batch)}, sorts_last=not sorts_first
        )
        await self._gates.follow_up(
            {(tenant, job.lane) for job in batch.jobs if job.lane is not None},
            [job.id for job in batch.jobs if job.id is not None and job.lane is None and job.needs],
        )
        return answer

    async def _queues_of(self, batch: Batch) -> set[str]:
        """Return the queues of a batch's jobs. Registrations may be a second old: a notification is only a hint."""
        queues = {job.queue for job in batch.jobs if job.queue is not None}
        without_queue = {job.capability for job in batch.jobs if job.queue is None}
        named = any(capability.startswith("function:") for capability in without_queue)
        if named and time.monotonic() >= self._function_queues_until:
            self._function_queues_until = time.monotonic() + QUEUES_SECONDS
            with contextlib.suppress(StoreError):  # The jobs are accepted: the call must not fail now.
                rows = await self._database.read("function_defaults")
                found = {f"function:{row['function']}": msgspec.json.decode(row["defaults"]) for row in rows}
                self._function_queues = {name: has["queue"] for name, has in found.items() if "queue" in has}
        otherwise = batch.defaults.get("queue", QUEUE)
        return queues | {self._function_queues.get(capability, otherwise) for capability in without_queue}

    async def get(self, job_id: str, *, tenant: str = "default") -> Job:
        found = await self._database.read("get_job", id=known_id(job_id), tenant=tenant)
        if not found:
            raise NotFound("job", job_id)
        return to_job(found[0])

    async def list(
        self,
        *,
        tenant: str = "default",
        status: Sequence[Status] = (),
        kind: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        labels: Mapping[str, str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> JobPage:
        """List jobs, newest first. The order never changes, so a cursor neither skips nor repeats."""
        filters = Filters(
            tenant=tenant,
            statuses=[Status(one) for one in dict.fromkeys(status)],
            kind=kind,
            queue=queue,
            lane=lane,
            labels=labels or {},
            since=since,
            until=until,
        )
        return await list_jobs(self._database, filters, limit=limit, cursor=cursor)

    async def with_prefix(self, prefix: str, *, tenant: str = "default", limit: int = 100) -> Sequence[Job]:
        """Return jobs whose ids begin with `prefix`, by id."""
        digits = prefix.replace("-", "").lower()
        if not digits or len(digits) > ID_DIGITS or not set(digits) <= set("0123456789abcdef"):
            raise Invalid("id", f"{prefix[:60]!r} is not the beginning of an id")
        least, most = (str(uuid.UUID(digits.ljust(ID_DIGITS, fill))) for fill in "0f")
        rows = await self._database.read("jobs_between", tenant=tenant, least=least, most=most, limit=limit)
        return [to_job(row) for row in rows]

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
                await self._refuse_open_attempt(tx, row)
            if row["status"] == Status.CANCELLED and not stopped:
                await self._refuse_given_up(tx, row)
            await self._refuse_broken_needs(tx, row)
            if (spent := refusal(to_json(row["usage"], {}), to_json(row["budget"]), budget)) is not None:
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
            raise Blocked(job_id, job.status)
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
        await self._tell(moved)
        return moved

    async def _tell(self, moved: Moved) -> None:
        self._notifications.post(notify.work(queue) for queue in moved.queues)
        if moved.unsettled or moved.unresolved:
            lane = moved.before["lane"]
            await self._gates.follow_up(
                [] if lane is None else [(moved.before["tenant"], lane)],
                [moved.before["id"]] if lane is None else [],
                settle=[moved.before["id"]] if moved.unsettled else [],
            )

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
        self._notifications.post(notify.work(queue) for queue in queues)
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
        self._notifications.post(notify.work(queue) for queue in queues)
        return gone

    async def existing(self, ids: Sequence[str]) -> frozenset[str]:
        """Return which of these jobs exist, in any tenant."""
        found = await self._database.read("existing_jobs", ids=[job_id for job_id in ids if _is_id(job_id)])
        return frozenset(row["id"] for row in found)

    async def refuse_taken_ids(self, batch: Batch) -> None:
        """Raise an error that names the id because of which the database refused a batch."""
        for row in await self._database.read("existing_jobs", ids=list(batch.ids)):
            raise id_taken(row["id"]) if row["tenant"] == batch.tenant else id_unusable(row["id"])

    async def _refuse_open_attempt(self, tx: Tx, row: Row) -> NoReturn:
        """Refuse a resume: name the worker that will adopt the open attempt, or what a person must check first."""
        what = _may_still_run(row["id"], row["attempt"], row["domain"])
        reaching = await tx.rows("workers_in_domain", domain=row["domain"]) if row["error_code"] == "lost" else ()
        if reaching:
            raise Conflict(
                f"{what}, and worker {reaching[0]['worker']} is there and will adopt it; "
                "wait for it, or stop the attempt and resume with stopped=true"
            )
        raise Conflict(f"{what}; make sure that it does not, then resume with stopped=true")

    async def _refuse_given_up(self, tx: Tx, row: Row) -> None:
        """Refuse to resume a job that was cancelled while its host was unreachable: its attempt may still run."""
        for attempt in await tx.rows("unstopped_attempt", id=row["id"]):
            what = _may_still_run(row["id"], attempt["attempt"], attempt["domain"])
            raise Conflict(f"{what}; make sure that it does not, then resume with stopped=true")

    async def _refuse_broken_needs(self, tx: Tx, row: Row) -> None:
        if not row["has_needs"]:
            return
        needs = [need["need_id"] for need in await tx.rows("open_needs", id=row["id"])]
        if not needs:
            return
        states = await tx.rows("need_states", tenant=row["tenant"], ids=needs)
        existing = {state["id"]: Status(state["status"]) for state in states}
        for need in needs:
            if need not in existing:
                raise Conflict(
                    f"cannot resume job {row['id']}: it needs job {need}, which was deleted; submit a new job"
                )
            if existing[need] in BROKEN:
                raise NeedFailed(need, existing[need])


async def _record_delete(tx: Tx, kind: StopKind, row: Row, by: By, reason: str | None, *, force: bool = True) -> None:
    """Record the decision to delete a job in the audit trail once; the duty that carries it out adds no second row."""
    if kind is StopKind.DELETE and row["stop_kind"] != StopKind.DELETE:
        before, after = {"status": row["status"]}, {"force": force}
        await record(tx, by, "job.delete", row["id"], tenant=row["tenant"], before=before, after=after, reason=reason)


def _may_still_run(job_id: str, attempt: int, domain: str) -> str:
    return f"cannot resume job {job_id}: its attempt {attempt} may still run in {domain}"


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


def _is_id(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def _given_id(job: Submission | Mapping[str, Any]) -> bool:
    return (job.id if isinstance(job, Submission) else job.get("id")) is not None
