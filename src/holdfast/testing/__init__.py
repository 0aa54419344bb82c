"""Test suites for authors of runners and artifact stores: ours pass the same ones.

runner_suite.py    RunnerSuite, for runners
artifact_suite.py  ArtifactSuite, for artifact stores
"""

from holdfast.testing.artifact_suite import ArtifactSuite
from holdfast.testing.runner_suite import INSTALLATION, RunnerSuite

__all__ = ["INSTALLATION", "ArtifactSuite", "RunnerSuite"]
