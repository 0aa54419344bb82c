"""holdfast against yardsticks that are no peers: its store against raw SQL, its service against a constant answer."""

import asyncio
from pathlib import Path

from tests.support.service import service_process_on

from bench import service, store
from bench.peers.run import Run
from holdfast.store.migrate import migrate
from holdfast.store.store import connect


async def store_rates(run: Run) -> None:
    postgres = run.deployments.keepers.postgres
    url = await postgres.make("reference_store")
    bulk, work, _ = await store.postgres_rates(url, run.rounds)
    for n in range(run.rounds):
        run.part.add("holdfast", store_work=work.ours[n], store_bulk=bulk.ours[n])
        run.part.add("raw", store_work=work.raw[n], store_bulk=bulk.raw[n])
    await postgres.drop("reference_store")


async def http_rates(run: Run) -> None:
    postgres = run.deployments.keepers.postgres
    url = await postgres.make("reference_service")
    database = await connect(url, connections=1, listen=False)
    await migrate(database)
    await database.close()

    def serve(folder: Path) -> tuple[list[float], list[float]]:
        with service_process_on(url, folder) as served:
            return asyncio.run(service.submit_rates(served, run.rounds))

    ours, constant = await asyncio.to_thread(serve, run.deployments.keepers.folder / "service")
    for mine, other in zip(ours, constant, strict=True):
        run.part.add("holdfast", http_submit=mine, http_constant=other)
    await postgres.drop("reference_service")


async def bench(run: Run) -> None:
    await store_rates(run)
    await http_rates(run)
