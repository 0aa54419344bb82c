"""DBOS (Python): workflows without steps."""

from bench.peers.peer import Crowd, Keeper, Peer, Record, Runtime

SUCCEEDED = "SELECT count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'"

PEER = Peer(
    name="DBOS",
    runtime=Runtime.PYTHON,
    keeper=Keeper.POSTGRES,
    program="dbos",
    packages=("dbos", "sqlalchemy", "psycopg"),
    configuration=(
        "a queue that is polled every 10 ms, 200 workflows at once per worker. Bulk: `enqueue_in_transaction`, "
        "1,000 per transaction; single: `enqueue`. A workflow without steps is the least that it can run."
    ),
    keeps="the workflow with its input and its output",
    ended=SUCCEEDED,
    records=(
        Record("workflows that succeeded", SUCCEEDED),
        Record("outputs", "SELECT count(*) FROM dbos.workflow_output"),
    ),
    crowd=Crowd("dbos.workflow_status", "workflow_uuid", "gen_random_uuid()::text"),
    share=0.1,
)
