"""The supervisor: one static C program, built with the package. The head of `main.c` describes it."""

from pathlib import Path

from holdfast.errors import ConfigError

NAME = "holdfast-supervisor"


def path() -> Path:
    """Return the built program."""
    built = Path(__file__).with_name(NAME)
    if not built.exists():
        raise ConfigError(["the supervisor is not built: python -m holdfast.runner.supervisor.build"])
    return built
