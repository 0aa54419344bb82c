"""Who calls, and what that caller may do.

A token names its holder, a role and a tenant; an admin acts in tenant `default` unless `Holdfast-Tenant` says another.
With HOLDFAST_AUTH=off everybody on this machine is an admin, so a web page that runs in a browser here must not be
able to call: the Host has to be a loopback name, the Origin our own, and whatever writes has to say that it is JSON, or
have a header that a page cannot send without asking first.
"""

import asyncio
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from holdfast.config import Settings, loopback
from holdfast.errors import BadRequest, ConfigError, Conflict, Forbidden, Invalid, RateLimited, StoreError, Unauthorized
from holdfast.model import Role, Token
from holdfast.store.tokens import PREFIX, Tokens, new_secret

TENANT = "Holdfast-Tenant"
DEFAULT_TENANT = "default"
KNOWN_SECONDS = 2.0
"""How long a token is taken for what it was: another server may take it back meanwhile."""
KNOWN_MOST = 10_000
MAX_NAME = 200


@dataclass(frozen=True)
class Caller:
    """`by` stands in audit events."""

    by: str
    role: Role
    tenant: str

    @property
    def admin(self) -> bool:
        return self.role is Role.ADMIN

    def require(self, role: Role) -> None:
        if not self.role.includes(role):
            raise Forbidden(f"this needs the role {role}; token {self.by} is a {self.role}")


class Access:
    def __init__(self, tokens: Tokens, settings: Settings) -> None:
        self._tokens = tokens
        self._off = settings.auth == "off"
        self._rate = settings.rate_limit
        self._known: dict[str, tuple[float, Token]] = {}
        self._buckets: dict[str, tuple[float, float]] = {}

    def guard(self, request: Request) -> None:
        """With tokens off, refuse whatever a web page could have sent."""
        if not self._off:
            return
        headers = request.headers
        client = request.client
        if client is not None and not loopback(client.host):
            raise Forbidden("tokens are off, so only this machine may call")
        forwarded = next((name for name in headers if name == "forwarded" or name.startswith("x-forwarded-")), None)
        if forwarded is not None:
            raise Forbidden(
                f"tokens are off, so what a proxy forwards is refused ({forwarded}): turn tokens on behind one"
            )
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
                "tokens are off, so whatever writes must have Content-Type: application/json; "
                f"an upload, which is a form, must have the header {TENANT}"
            )

    async def caller(self, request: Request) -> Caller:
        """Find out who calls; the same refusal for every token that is not one."""
        wanted = request.headers.get(TENANT)
        if wanted is not None:
            wanted = checked_name("Holdfast-Tenant", wanted)
        if self._off:
            return Caller("local", Role.ADMIN, wanted or DEFAULT_TENANT)
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized("send a token: Authorization: Bearer hf_…")
        token = await self._token(secret.strip())
        if token is None:
            raise Unauthorized("this token is not known, has expired, or was taken back")
        self._count(token)
        if token.tenant is None:
            return Caller(token.name, token.role, wanted or DEFAULT_TENANT)
        if wanted not in (None, token.tenant):
            raise Forbidden(f"token {token.name} is of tenant {token.tenant}; only an admin chooses the tenant")
        return Caller(token.name, token.role, token.tenant)

    async def still_valid(self, request: Request) -> bool:
        """Whether the token of a request that goes on is still valid; while the database is away, it is taken to be."""
        if self._off:
            return True
        _, _, secret = request.headers.get("authorization", "").partition(" ")
        try:
            return await self._token(secret.strip()) is not None
        except StoreError:
            return True

    def forget(self) -> None:
        """Look every token up again, since one was taken back."""
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
        if token is not None:
            self._known[secret] = (now + KNOWN_SECONDS, token)
        return token

    def _count(self, token: Token) -> None:
        """A bucket per token that holds one second's requests and fills steadily."""
        if self._rate is None:
            return
        now = time.monotonic()
        full = max(1.0, self._rate)
        left, at = self._buckets.get(token.id, (full, now))
        left = min(full, left + (now - at) * self._rate)
        if left < 1:
            self._buckets[token.id] = (left, now)
            raise RateLimited((1 - left) / self._rate)
        if len(self._buckets) >= KNOWN_MOST:
            self._buckets.clear()
        self._buckets[token.id] = (left - 1, now)


def says_json(headers: Mapping[str, str]) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json"


def checked_name(field: str, text: str) -> str:
    if not 1 <= len(text) <= MAX_NAME or not text.isprintable():
        raise Invalid(field, f"is empty, over {MAX_NAME} characters, or has control characters")
    return text


def _host(url: str, scheme: str | None = None) -> tuple[str, int | None] | None:
    """The host and port of a URL; with a scheme, only of a URL that has it, and its own port if none is said."""
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
    """Make the first admin token, in a file that only its owner reads; say whether one was made.

    The file comes first: a crash before the database knows it leaves a token that the next start makes known. Of two
    servers that start at once, one names the file and both make the same token known.
    """
    if await tokens.has_admin():
        return False
    secret = await asyncio.to_thread(_keep_secret, path)
    try:
        await tokens.add("admin", Role.ADMIN, secret=secret, by="holdfast")
    except Conflict:
        if await tokens.find(secret) is None:  # Another server, with another data folder, was first.
            await asyncio.to_thread(path.unlink, missing_ok=True)
        return False
    return True


def _keep_secret(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _read(path) or _write(path, new_secret())


def _write(path: Path, secret: str) -> str:
    """Put a secret under its name at once, whole and private, unless somebody else just did."""
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
            raise ConfigError([f"{path} is not a file of our own that nobody else can open: remove it"])
        secret = file.read(MAX_NAME).strip()
    if not secret.startswith(PREFIX) or len(secret) < 40:
        raise ConfigError([f"{path} holds no token: remove it"])
    return secret
