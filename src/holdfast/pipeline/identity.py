"""Identities: what a task's result depends on, as named components, and the id of the snapshot that it makes.

A hash is SHA-256 over fields, each preceded by its length, so that different lists of fields cannot collide. The first
field names what is hashed and its version. An id is chained from the snapshot that the task started from; a chain
starts with its tenant. Names of files and tasks are not part of it, nor are limits and the values of secrets.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from holdfast.response_types import Difference

TASK = "holdfast task 1"
SNAPSHOT = "holdfast snapshot 1"
ROOT = "holdfast root 1"
TEXT = "holdfast text 1"
PARENT = "parent"
ID_LENGTH = 64

Components = Mapping[str, str]


def hash_fields(fields: Iterable[str | bytes]) -> str:
    """Return the SHA-256 over fields, each preceded by its length."""
    whole = hashlib.sha256()
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        whole.update(len(data).to_bytes(8, "big"))
        whole.update(data)
    return whole.hexdigest()


def text_hash(*parts: str) -> str:
    return hash_fields((TEXT, *parts))


def task_hash(components: Components) -> str:
    """Return the hash of a task's components, independent of their order."""
    return hash_fields((TASK, *(part for name in sorted(components) for part in (name, components[name]))))


def root_of(tenant: str) -> str:
    """Return the start of a tenant's chains."""
    return hash_fields((ROOT, tenant))


def snapshot_id(parent: str, task: str) -> str:
    return hash_fields((SNAPSHOT, parent, task))


class KnownSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison needs of an existing snapshot."""

    id: str
    parent: str
    components: Components


class CacheMiss(msgspec.Struct, frozen=True, kw_only=True):
    """Why a task has no snapshot: the nearest existing one, and what differs."""

    nearest: str
    differs: tuple[Difference, ...]


def differences(components: Components, parent: str, known: KnownSnapshot) -> tuple[Difference, ...]:
    """Return the names of components in which a task differs from a known snapshot."""
    mine, theirs = {**components, PARENT: parent}, {**known.components, PARENT: known.parent}
    found = []
    for name in sorted({*mine, *theirs}):
        if name not in theirs:
            found.append(Difference(component=name, change="added"))
        elif name not in mine:
            found.append(Difference(component=name, change="removed"))
        elif mine[name] != theirs[name]:
            found.append(Difference(component=name, change="changed"))
    return tuple(found)


def nearest(components: Components, parent: str, known: Sequence[KnownSnapshot]) -> CacheMiss | None:
    """Return the known snapshot that differs least, the first of several; None if none is known."""
    misses = [CacheMiss(nearest=one.id, differs=differences(components, parent, one)) for one in known]
    return min(misses, key=lambda miss: len(miss.differs), default=None)


def explain(miss: CacheMiss | None) -> str:
    """Describe a miss in words."""
    if miss is None:
        return "no snapshot is known yet"
    changes = ", ".join(f"{one.component} {one.change}" for one in miss.differs)
    return f"nearest is {miss.nearest[:12]}: {changes}"
