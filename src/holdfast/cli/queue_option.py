"""The option `--queue`: queues and their slots, as text."""

from collections.abc import Mapping

from holdfast.errors import ConfigError

SLOTS = 1
MOST_SLOTS = 10_000


def parse_queues(text: str) -> dict[str, int]:
    """Read `default:4,heavy:1`; a queue without a number gets one slot."""
    queues: dict[str, int] = {}
    problems = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "")
        if not name or (colon and not slots.isdigit()) or (slots and not 1 <= int(slots) <= MOST_SLOTS):
            problems.append(f"--queue {part.strip()!r}: use name or name:slots, with 1 to {MOST_SLOTS} slots")
        elif name in queues:
            problems.append(f"--queue names {name} twice")
        else:
            queues[name] = int(slots or SLOTS)
    if problems:
        raise ConfigError(problems)
    return queues


def queue_text(queues: Mapping[str, int]) -> str:
    """Write queues as the option does."""
    return ",".join(f"{name}:{slots}" for name, slots in queues.items())
