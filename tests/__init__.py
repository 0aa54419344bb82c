import os

if os.environ.get("HOLDFAST_TEST_POOLER"):
    from tests.support.pgbouncer import reroute

    reroute()
