"""holdfast on SQLite, beside Huey."""

import dataclasses

from bench.peers.adapters import holdfast
from bench.peers.peer import Keeper

PEER = dataclasses.replace(
    holdfast.PEER,
    name="holdfast (SQLite)",
    keeper=Keeper.SQLITE,
    ended=holdfast.PEER.ended.replace("holdfast.", ""),
    records=tuple(
        dataclasses.replace(record, query=record.query.replace("holdfast.", "")) for record in holdfast.PEER.records
    ),
    registered="SELECT count(*) FROM workers",
    pinned=False,
)
