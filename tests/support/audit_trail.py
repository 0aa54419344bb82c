"""What the tests of the audit trail share."""

from typing import Any

from holdfast.model import Actor, AuditEntry, Role
from holdfast.store import Store

ANN = Actor(name="ann", token_id="01890000-0000-7000-8000-000000000001", role=Role.OPERATOR, address="192.0.2.7")
SECRET = "s3cret-value-of-a-check"


async def trail(store: Store, **filters: Any) -> list[AuditEntry]:
    """The trail, oldest first."""
    return list(reversed((await store.audit.list(limit=1000, **filters)).items))
