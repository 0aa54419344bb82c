"""Builds the settings from defaults < file < environment < flags, with all problems reported at once."""

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.config.settings import Settings
from holdfast.errors import ConfigError

PREFIX = "HOLDFAST_"
CONFIG_FILE = "HOLDFAST_CONFIG"
PLATFORM_VARIABLES = {"DATABASE_URL", "DOCKER_HOST"}
"""Variables that platforms set for every program."""


def load(
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Build the settings from all four sources, or raise an error that lists every problem."""
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    found: dict[str, tuple[str, object]] = {}
    fields = {field.name: field for field in dataclasses.fields(Settings)}

    source = file or (Path(environment[CONFIG_FILE]) if environment.get(CONFIG_FILE) else None)
    for name, value in _read_file(source, problems).items():
        if name in fields:
            found[name] = (f"{name} in {source}", value)
        else:
            problems.append(f"{name} in {source} is not a setting")
    found |= {name.lower(): (name, environment[name]) for name in PLATFORM_VARIABLES if environment.get(name)}
    for name in fields:
        if environment.get(PREFIX + name.upper()):
            found[name] = (PREFIX + name.upper(), environment[PREFIX + name.upper()])
    for name, value in (flags or {}).items():
        if value is not None:
            found[name] = (f"--{name.replace('_', '-')}", value)

    values: dict[str, Any] = {}
    for name, (where, value) in found.items():
        try:
            values[name] = fields[name].metadata["parse"](value)
        except ValueError as error:
            problems.append(f"{where} is {value!r}: {error}")
    try:
        settings = Settings(**values)
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return settings


def _read_file(path: Path | None, problems: list[str]) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        problems.append(f"cannot read {path}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path} is not TOML: {error}")
    return {}
