import os

if os.environ.get("HOLDFAST_TEST_POOLER"):
    from tests.pooler import reroute

    reroute()
