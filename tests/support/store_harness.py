"""A harness for tests: a migrated store on one of the two databases, with a manual clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast.model import FUNCTION_DOMAIN, Claimable, Event, Job, Lease, Outcome, Status
from holdfast.store import Store
from holdfast.store.postgres import PostgresDatabase
from holdfast.timing import ManualClock

TTL = 60.0
START = datetime(2026, 1, 17, 9, tzinfo=UTC)

TEST_CLOCK = """
CREATE TABLE holdfast.test_clock (at timestamptz NOT NULL);
CREATE OR REPLACE FUNCTION holdfast.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
'SELECT coalesce((SELECT max(at) FROM holdfast.test_clock), clock_timestamp())';
"""


@dataclass
class StoreHarness:
    """What a conformance test works with. `kind` is for messages only: a test must not ask for it."""

    kind: str
    url: str
    store: Store
    clock: ManualClock

    async def advance(self, seconds: float) -> None:
        """Move the database's clock."""
        self.clock.advance(seconds)
        await self.sync_clock()

    async def sync_clock(self) -> None:
        if isinstance(self.store.database, PostgresDatabase):
            await self.store.database.fetch(
                "WITH gone AS (DELETE FROM holdfast.test_clock) INSERT INTO holdfast.test_clock VALUES ($1)",
                self.clock.now(),
            )

    def later(self, seconds: float) -> datetime:
        return self.clock.now() + timedelta(seconds=seconds)

    async def submit(self, **fields: Any) -> Job:
        """Submit a job that worker `claim` can claim, unless the fields say otherwise."""
        tenant = fields.pop("tenant", "default")
        job = {"runner": "function", "spec": {"name": "f"}, **fields}
        return await self.store.jobs.submit(job, tenant=tenant)

    async def claim(
        self, slots: int = 10, *, worker: str = "w1", queue: str = "default", name: str = "f"
    ) -> Sequence[Lease]:
        """Claim function jobs; adopt nothing."""
        pair = Claimable(queue=queue, capability=f"function:{name}", domain=FUNCTION_DOMAIN)
        return (await self.store.leases.claim(worker, [pair], slots=slots, ttl=TTL)).claimed

    async def claim_process(self, slots: int = 10, *, worker: str = "w1", domain: str = "host-a") -> Sequence[Lease]:
        """Claim process jobs of the default queue; adopt nothing."""
        pair = Claimable(queue="default", capability="process", domain=domain)
        return (await self.store.leases.claim(worker, [pair], slots=slots, ttl=TTL)).claimed

    async def adopt(
        self, *, worker: str = "w2", domains: Sequence[str] = (FUNCTION_DOMAIN, "host-a")
    ) -> Sequence[Lease]:
        return (await self.store.leases.claim(worker, [], slots=0, ttl=TTL, domains=domains)).adopted

    async def finish(self, lease: Lease, outcome: Outcome | None = None) -> Status | None:
        answers = await self.store.leases.finish([(lease, outcome or Outcome.succeeded())])
        return answers[lease.id]

    async def fail(self, lease: Lease, message: str = "boom") -> Status | None:
        return await self.finish(lease, Outcome.failed("exit_nonzero", message, exit_code=1))

    async def get(self, job: Job | Lease | str) -> Job:
        return await self.store.jobs.get(job if isinstance(job, str) else job.id)

    async def status(self, job: Job | Lease | str) -> Status:
        return (await self.get(job)).status

    async def events(self, job: Job | Lease | str) -> Sequence[Event]:
        return (await self.store.events.page(job if isinstance(job, str) else job.id)).items

    async def run_one(self) -> Lease:
        """Claim exactly one job and let it succeed."""
        (lease,) = await self.claim(slots=1)
        assert await self.finish(lease) is Status.SUCCEEDED
        return lease
