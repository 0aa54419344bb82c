"""One file per peer: how it is configured, what it keeps, and the queries that count it."""

from bench.peers.adapters import (
    awa,
    celery,
    dbos,
    graphile,
    holdfast,
    holdfast_sqlite,
    huey,
    oban,
    pgboss,
    pgqueuer,
    procrastinate,
    raw,
)
from bench.peers.peer import Peer

PEERS: dict[str, Peer] = {
    "holdfast": holdfast.PEER,
    "graphile": graphile.PEER,
    "pgboss": pgboss.PEER,
    "pgqueuer": pgqueuer.PEER,
    "awa": awa.PEER,
    "oban": oban.PEER,
    "procrastinate": procrastinate.PEER,
    "dbos": dbos.PEER,
    "celery": celery.PEER,
    "holdfast-sqlite": holdfast_sqlite.PEER,
    "huey": huey.PEER,
    "raw": raw.PEER,
}
"""By the name that the command line uses, in the order of the page."""
