"""The survivors that are accepted, each with the reason; `survivors.toml` beside this file lists them."""

import tomllib
from pathlib import Path

from scripts.mutation.mutant import Mutant

FILE = Path(__file__).parent / "survivors.toml"
KINDS = ("equivalent", "harmless")
"""Equivalent: no test can tell. Harmless: a test could, but it is not worth one. Fencing is never harmless."""


def accepted(text: str) -> dict[tuple[str, str], str]:
    """For each accepted survivor, by its place and change, the reason; raise ValueError for a wrong entry."""
    found: dict[tuple[str, str], str] = {}
    for entry in tomllib.loads(text).get("survivor", []):
        if entry.keys() != {"where", "change", "kind", "reason"} or entry["kind"] not in KINDS or not entry["reason"]:
            raise ValueError(f"survivors.toml: {entry} needs where, change, kind ({' or '.join(KINDS)}) and reason")
        found[entry["where"], entry["change"]] = f"{entry['kind']}: {entry['reason']}"
    return found


def reason_for(mutant: Mutant, reasons: dict[tuple[str, str], str]) -> str | None:
    """Why a survivor is accepted, if it is. In fencing and transitions only an equivalent one is."""
    reason = reasons.get(mutant.key)
    return None if reason and mutant.fencing and not reason.startswith("equivalent") else reason
