"""Authenticates callers, and decides what they may do.

A token has a name, a role and a tenant; an admin acts in tenant `default` unless `Holdfast-Tenant` names another. With
HOLDFAST_AUTH=off everybody on this machine is an admin, so a web page in a local browser must not be able to call: the
Host must be a loopback name, the Origin our own, and a request that writes must have a JSON content type or a header
that a page cannot send without a preflight request.
"""

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from holdfast.config import Settings, loopback
from holdfast.errors import BadRequest, ConfigError, Conflict, Forbidden, Invalid, RateLimited, StoreError, Unauthorized
from holdfast.model import Actor, Role, Token
from holdfast.permissions import PASSABLE, make_folder
from holdfast.store.audit import Audit, local_actor
from holdfast.store.tokens import PREFIX, Tokens, new_secret

TENANT = "Holdfast-Tenant"
DEFAULT_TENANT = "default"
KNOWN_SECONDS = 2.0
"""How long a token is cached: another server may delete it meanwhile."""
KNOWN_MOST = 10_000
MAX_NAME = 200
USES_SECONDS = 15.0
REFUSALS_SECONDS = 60.0
"""The shortest interval between records of refused tokens: a stranger can cause at most one row per minute."""
ADDRESSES_COUNTED = 1000
ADDRESSES_NAMED = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """Who makes a request; `by` is the name in audit events."""

    by: str
    role: Role
    tenant: str
    token_id: str | None = None
    address: str | None = None

    @property
    def actor(self) -> Actor:
        """The caller as it appears in the audit trail."""
        return Actor(name=self.by, token_id=self.token_id, role=self.role, address=self.address)

    @property
    def admin(self) -> bool:
        return self.role is Role.ADMIN

    def require(self, role: Role) -> None:
        if not self.role.includes(role):
            raise Forbidden(f"this needs the role {role}; token {self.by} is a {self.role}")


class Access:
    def __init__(self, tokens: Tokens, audit: Audit, settings: Settings) -> None:
        self._tokens = tokens
        self._audit = audit
        self._off = settings.auth == "off"
        self._known: dict[str, tuple[float, Token]] = {}
        self._requests = RateLimiter(settings.rate_limit, burst=1.0)
        self._failures = RateLimiter(settings.auth_failures, burst=10.0)
        self._trusted: set[str] = set()
        """Secrets that were valid once: unknown tokens from the same address must not lock them out."""
        self._used: dict[str, str | None] = {}
        """Tokens that were used since the last write, with the address of the caller."""
        self._refused = UnknownTokenCounts()

    def guard(self, request: Request) -> None:
        """With tokens off, refuse every request that a web page could have sent."""
        if not self._off:
            return
        headers = request.headers
        client = request.client
        if client is not None and not loopback(client.host):
            raise Forbidden("tokens are off, so only this machine may call")
        forwarded = next((name for name in headers if name == "forwarded" or name.startswith("x-forwarded-")), None)
        if forwarded is not None:
            raise Forbidden(f"tokens are off, so requests through a proxy are refused ({forwarded}): turn tokens on")
        host = _host(f"//{headers.get('host', '')}")
        if host is None or not loopback(host[0]):
            raise Forbidden("tokens are off, so the Host must be localhost, 127.0.0.1 or [::1]")
        origin, scheme = headers.get("origin"), request.scope["scheme"]
        if origin is not None and _host(origin, scheme) != (host[0], host[1] or _port(scheme)):
            raise Forbidden(f"tokens are off, so pages of another origin may not call: {origin[:100]}")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("tokens are off, so pages of another site may not call")
        if request.method in ("POST", "PUT", "PATCH") and not says_json(headers) and TENANT not in headers:
            raise BadRequest(
                "tokens are off, so requests that write must have Content-Type: application/json; "
                f"an upload, which is a form, must have the header {TENANT}"
            )

    async def caller(self, request: Request) -> Caller:
        """Find the caller of a request; every invalid token gets the same error."""
        wanted = request.headers.get(TENANT)
        if wanted is not None:
            wanted = checked_name("Holdfast-Tenant", wanted)
        address = request.client.host if request.client is not None else None
        if self._off:
            return Caller("local", Role.ADMIN, wanted or DEFAULT_TENANT, address=address)
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized("send a token: Authorization: Bearer hf_…")
        secret = secret.strip()
        if secret not in self._trusted:
            try:
                self._failures.refuse(address or "", "too many requests with unknown tokens from this address")
            except RateLimited:
                self._refused.add(address or "")
                raise
        token = await self._token(secret)
        if token is None:
            self._trusted.discard(secret)
            self._failures.take(address or "")
            self._refused.add(address or "")
            raise Unauthorized("this token is unknown, has expired, or was deleted")
        self._trusted.add(secret)
        self._used[token.id] = address
        self._requests.refuse(token.id, "too many requests with this token")
        self._requests.take(token.id)
        if token.tenant is None:
            return Caller(token.name, token.role, wanted or DEFAULT_TENANT, token.id, address)
        if wanted not in (None, token.tenant):
            raise Forbidden(f"token {token.name} belongs to tenant {token.tenant}; only an admin can choose the tenant")
        return Caller(token.name, token.role, token.tenant, token.id, address)

    async def still_valid(self, request: Request) -> bool:
        """Return whether the token of an open request is still valid; assume so while the database is unreachable."""
        if self._off:
            return True
        _, _, secret = request.headers.get("authorization", "").partition(" ")
        try:
            return await self._token(secret.strip()) is not None
        except StoreError:
            return True

    def forget(self) -> None:
        """Clear the cache of tokens, since one was deleted."""
        self._known.clear()

    async def _token(self, secret: str) -> Token | None:
        if not secret.startswith(PREFIX) or len(secret) > MAX_NAME:
            return None
        now = time.monotonic()
        until, token = self._known.get(secret, (0.0, None))
        if token is not None and now < until:
            return token
        token = await self._tokens.find(secret)
        if len(self._known) >= KNOWN_MOST:
            self._known.clear()
            self._trusted.clear()
        if token is not None:
            self._known[secret] = (now + KNOWN_SECONDS, token)
        return token

    async def note_uses(self) -> None:
        """Record which tokens were used since the last call."""
        used, self._used = self._used, {}
        if used:
            await self._tokens.use(used)

    async def note_refusals(self) -> None:
        """Record how many requests with unknown tokens were refused since the last call, in one row."""
        if not self._refused.requests:
            return
        seen, self._refused = self._refused, UnknownTokenCounts()
        try:
            await self._audit.add(Actor(name="unknown"), "auth.refused", "token", after=seen.summary())
        except StoreError:
            self._refused.merge(seen)
            raise

    async def note_rest(self) -> None:
        """Record the remaining uses and refusals when the service ends."""
        with contextlib.suppress(StoreError):
            await self.note_uses()
            await self.note_refusals()

    async def keep_noting(self) -> None:
        """Record uses and refusals while the service runs.

        Uses that cannot be written are dropped; refusals stay counted.
        """
        refusals_due = time.monotonic() + REFUSALS_SECONDS
        while True:
            await asyncio.sleep(USES_SECONDS)
            try:
                await self.note_uses()
                if time.monotonic() >= refusals_due:
                    await self.note_refusals()
                    refusals_due = time.monotonic() + REFUSALS_SECONDS
            except StoreError as error:
                log.warning("could not record the last use of tokens; dropping it: %s", error)


class UnknownTokenCounts:
    """Requests with unknown tokens, counted by address, in bounded memory and in a row of bounded size."""

    def __init__(self) -> None:
        self.requests = 0
        self._addresses: Counter[str] = Counter()

    def add(self, address: str) -> None:
        self.requests += 1
        if address in self._addresses or len(self._addresses) < ADDRESSES_COUNTED:
            self._addresses[address] += 1

    def merge(self, earlier: "UnknownTokenCounts") -> None:
        self.requests += earlier.requests
        for address, requests in earlier._addresses.most_common(ADDRESSES_COUNTED - len(self._addresses)):
            self._addresses[address] += requests

    def summary(self) -> dict[str, Any]:
        """Return the most active addresses; `addresses` counts up to a limit."""
        most = dict(self._addresses.most_common(ADDRESSES_NAMED))
        return {"requests": self.requests, "addresses": len(self._addresses), "most": most}


class RateLimiter:
    """A token bucket per key; without a rate nothing is limited."""

    def __init__(self, rate: float | None, *, burst: float) -> None:
        self._rate = rate
        self._full = 0.0 if rate is None else max(1.0, rate * burst)
        self._buckets: dict[str, tuple[float, float]] = {}

    def refuse(self, key: str, why: str) -> None:
        """Refuse if the bucket is empty."""
        if self._rate is not None and (left := self._left(key)) < 1:
            raise RateLimited((1 - left) / self._rate, why)

    def take(self, key: str) -> None:
        if self._rate is None:
            return
        left = self._left(key)
        if len(self._buckets) >= KNOWN_MOST:
            self._buckets.clear()
        self._buckets[key] = (left - 1, time.monotonic())

    def _left(self, key: str) -> float:
        now = time.monotonic()
        left, at = self._buckets.get(key, (self._full, now))
        return min(self._full, left + (now - at) * (self._rate or 0.0))


def says_json(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json"


def checked_name(field: str, text: str) -> str:
    if not 1 <= len(text) <= MAX_NAME or not text.isprintable():
        raise Invalid(field, f"is empty, over {MAX_NAME} characters, or has control characters")
    return text


def _host(url: str, scheme: str | None = None) -> tuple[str, int | None] | None:
    """Return host and port of a URL; with `scheme`, only if the URL has it, with that scheme's port as default."""
    try:
        parts = urlsplit(url)
        if parts.hostname is None or parts.username is not None or (scheme is not None and parts.scheme != scheme):
            return None
        return parts.hostname, parts.port or (None if scheme is None else _port(scheme))
    except ValueError:
        return None


def _port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


async def first_admin(tokens: Tokens, path: Path) -> bool:
    """Make the first admin token, in a file that only its owner can read; return whether one was made.

    The file is written first: after a crash before the database has the token, the next start adds it. If two servers
    start at once, one creates the file and both add the same token.
    """
    if await tokens.has_admin():
        return False
    secret = await asyncio.to_thread(_keep_secret, path)
    try:
        await tokens.add("admin", Role.ADMIN, secret=secret, by=local_actor("server"))
    except Conflict:
        if await tokens.find(secret) is None:  # Another server, with another data folder, was first.
            await asyncio.to_thread(path.unlink, missing_ok=True)
        return False
    return True


def _keep_secret(path: Path) -> str:
    make_folder(path.parent, PASSABLE)
    return _read(path) or _write(path, new_secret())


def _write(path: Path, secret: str) -> str:
    """Create the secret's file atomically and private, unless another process just did; return the file's secret."""
    half = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(half, path)
        except FileExistsError:
            return _read(path) or secret
        return secret
    finally:
        half.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    """Read a secret that only we could have written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError([f"cannot read {path}: {error.strerror}"]) from error
    with os.fdopen(descriptor) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise ConfigError([f"{path} must be a regular file that only this user can open: remove it"])
        secret = file.read(MAX_NAME).strip()
    if not secret.startswith(PREFIX) or len(secret) < 40:
        raise ConfigError([f"{path} contains no token: remove it"])
    return secret
