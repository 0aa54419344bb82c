"""Settings: defaults < file < environment < flags, built once at the edge, with all problems reported at once.

settings.py  all settings with their defaults, and what follows from them
values.py    parsers for the value of one setting
checks.py    contradictions between settings
load.py      the four sources
"""

from holdfast.config.checks import loopback
from holdfast.config.load import CONFIG_FILE, PLATFORM_VARIABLES, PREFIX, load
from holdfast.config.settings import Settings
from holdfast.config.values import OnDisconnect, Pooler, Switch

__all__ = [
    "CONFIG_FILE",
    "PLATFORM_VARIABLES",
    "PREFIX",
    "OnDisconnect",
    "Pooler",
    "Settings",
    "Switch",
    "load",
    "loopback",
]
