"""PgQueuer (Python)."""

from bench.peers.peer import Crowd, Keeper, Peer, Record, Runtime


def logged(status: str) -> str:
    return f"SELECT count(*) FROM pgqueuer_log WHERE status = '{status}'"


PEER = Peer(
    name="PgQueuer",
    runtime=Runtime.PYTHON,
    keeper=Keeper.POSTGRES,
    program="pgqueuer",
    packages=("pgqueuer", "asyncpg", "uvloop"),
    configuration="asyncpg, uvloop, batches of 1,000. Bulk: `enqueue` of 10,000; single: `enqueue`.",
    keeps="a log row for each change of status; the job itself is deleted",
    ended=logged("successful") + " AND id > {mark}",
    mark="SELECT max(id) FROM pgqueuer_log",
    records=(
        Record("log rows `queued`", logged("queued")),
        Record("log rows `picked`", logged("picked")),
        Record("log rows `successful`", logged("successful")),
    ),
    crowd=Crowd("pgqueuer", "id", "nextval(pg_get_serial_sequence('pgqueuer', 'id'))"),
)
