"""The audit trail, for admins: read only."""

from holdfast.api.request_types import AuditList, ListAudit
from holdfast.api.routing import Call, Reply, Routes
from holdfast.errors import Invalid
from holdfast.model import Role
from holdfast.submission import FIRST_YEAR, LAST_YEAR

routes = Routes()


@routes.add("GET", "/v1/audit", role=Role.ADMIN, answers={200: AuditList})
async def list_audit(call: Call, query: ListAudit) -> Reply:
    """List the audit trail, newest first: changes of tokens, tools, limits, queues, lanes, workers, and jobs."""
    if query.since is not None and not FIRST_YEAR <= query.since.year <= LAST_YEAR:
        raise Invalid("since", f"is not between the years {FIRST_YEAR} and {LAST_YEAR}")
    page = await call.store.audit.list(
        who=query.who, what=query.what, since=query.since, limit=query.limit, cursor=query.cursor
    )
    return Reply(AuditList(items=page.items, next_cursor=page.next_cursor))
