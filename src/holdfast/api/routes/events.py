"""Events of a job: by page, as NDJSON, as server-sent events, as a file."""

from typing import Any

from starlette.responses import Response

from holdfast.api.fanout import Form
from holdfast.api.request_types import BIGGEST, EventList, ListEvents, NoParameters, StreamEvents
from holdfast.api.routing import Call, Reply, Routes
from holdfast.api.stream import MEDIA, EventStreamResponse
from holdfast.errors import Invalid
from holdfast.model import Role
from holdfast.store.rows import known_id

routes = Routes()
NDJSON = MEDIA["ndjson"]
DIGITS = len(str(BIGGEST))


@routes.add("GET", "/v1/jobs/{job_id}/events", role=Role.VIEWER, answers={200: EventList})
async def list_events(call: Call, job_id: str, query: ListEvents) -> Reply | Response:
    """Read events after `after`. With `Accept: application/x-ndjson`, all of them; with `follow`, also new ones."""
    if NDJSON in call.request.headers.get("accept", ""):
        return await _streamed(call, job_id, query.after, "ndjson", follow=query.follow)
    if query.follow:
        raise Invalid("follow", f"needs Accept: {NDJSON}")
    page = await call.store.events.page(job_id, tenant=call.tenant, after=query.after, limit=query.limit)
    return Reply(EventList(items=page.items, next_after=page.next_after))


@routes.add("GET", "/v1/jobs/{job_id}/events/stream", role=Role.VIEWER, answers={200: str}, media=MEDIA["sse"])
async def stream_events(call: Call, job_id: str, query: StreamEvents) -> Response:
    """Follow a job by server-sent events; `Last-Event-ID` takes precedence over `after`. The last event is `end`."""
    return await _streamed(call, job_id, _last_seen(call, query.after), "sse")


@routes.add("GET", "/v1/jobs/{job_id}/events/download", role=Role.VIEWER, answers={200: str}, media=NDJSON)
async def download_events(call: Call, job_id: str, query: NoParameters) -> Response:
    """Download all events so far as `events.ndjson`."""
    return await _streamed(call, job_id, 0, "ndjson", follow=False, name="events.ndjson")


async def _streamed(call: Call, job_id: str, after: int, form: Form, **more: Any) -> Response:
    service = call.service
    streamed = EventStreamResponse(
        service.fanout,
        known_id(job_id),
        streams=service.streams,
        by=call.who.by,
        valid=lambda: service.access.still_valid(call.request),
        tenant=call.tenant,
        after=after,
        form=form,
        stall=service.settings.stream_stall,
        **more,
    )
    return await streamed.opened()


def _last_seen(call: Call, after: int) -> int:
    last_event_id = call.request.headers.get("last-event-id", "").strip()
    if not last_event_id:
        return after
    if (
        not (last_event_id.isascii() and last_event_id.isdigit())
        or len(last_event_id) > DIGITS
        or int(last_event_id) > BIGGEST
    ):
        raise Invalid("Last-Event-ID", f"{last_event_id[:30]!r} is not the seq of an event")
    return int(last_event_id)
