"""holdfast on Postgres."""

from bench.peers.deployment import SLOTS
from bench.peers.peer import Crowd, Keeper, Peer, Record, Runtime

PEER = Peer(
    name="holdfast",
    runtime=Runtime.OURS,
    keeper=Keeper.POSTGRES,
    program="holdfast",
    packages=("holdfast", "asyncpg", "uvloop"),
    configuration=(
        f"`holdfast worker --queue default:{SLOTS}`, everything else by default. Bulk: `submit_many` of 10,000; "
        "single: `app.submit`."
    ),
    keeps="the job with its result, its spec, one attempt, and an event for the submit, the start and the end",
    # Not by status: that would read all versions of every job, and take 5 % of the processor from what is measured.
    ended="SELECT count(*) FROM holdfast.attempts",
    records=(
        Record("jobs that succeeded", "SELECT count(*) FROM holdfast.jobs WHERE status = 'succeeded'"),
        Record("specs", "SELECT count(*) FROM holdfast.specs WHERE id IN (SELECT id FROM holdfast.jobs)"),
        Record("attempts that ended", "SELECT count(*) FROM holdfast.attempts WHERE ended_at IS NOT NULL"),
        Record("started events", "SELECT count(*) FROM holdfast.job_events WHERE data ->> 'status' = 'running'"),
        Record("ended events", "SELECT count(*) FROM holdfast.job_events WHERE data ->> 'status' = 'succeeded'"),
        Record("results", "SELECT count(*) FROM holdfast.jobs WHERE status = 'succeeded' AND result IS NOT NULL"),
    ),
    registered="SELECT count(*) FROM holdfast.workers",
    crowd=Crowd("holdfast.jobs", "id", "holdfast.new_id()"),
    lanes=True,
)
