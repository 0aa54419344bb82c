"""For tests of applications, and for authors of runners, connectors and artifact stores.

application.py      an application with a store, a worker and a clock to move; `pytest_plugin.py` has the fixture
runner_suite.py     what a runner guarantees
connector_suite.py  what a connector guarantees
artifact_suite.py   what an artifact store guarantees
killed_worker.py    a process that starts an attempt, for a test to kill

The built-in runners and connectors pass these suites too. They are classes for pytest, with pytest-asyncio in its mode
`auto`. The runner or connector is installed, as its users install it, so that the registry finds its entry point:

    class TestMyRunner(RunnerSuite):
        name = "mine"

        def spec(self, script):
            return {"command": ["sh", "-c", script]}
"""

from holdfast.testing.artifact_suite import ArtifactSuite
from holdfast.testing.connector_suite import ConnectorSuite
from holdfast.testing.runner_suite import INSTALLATION, RunnerSuite

__all__ = ["INSTALLATION", "ArtifactSuite", "ConnectorSuite", "RunnerSuite"]
