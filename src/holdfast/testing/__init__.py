"""Test suites for authors of runners and artifact stores: ours pass the same ones.

runners.py    RunnerSuite, for runners
artifacts.py  ArtifactSuite, for artifact stores
"""

from holdfast.testing.artifacts import ArtifactSuite
from holdfast.testing.runners import INSTALLATION, RunnerSuite

__all__ = ["INSTALLATION", "ArtifactSuite", "RunnerSuite"]
