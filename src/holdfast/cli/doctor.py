"""`holdfast doctor`: checks everything that a healthy installation needs, and says how to fix problems."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast import registry
from holdfast.client.http import AsyncClient, Refused, ServerUnreachable
from holdfast.config import Settings
from holdfast.errors import HoldfastError
from holdfast.model import Role
from holdfast.runner import supervisor
from holdfast.runner.base import EngineUnreachable
from holdfast.runner.shared_folder import mismatch, read_id
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.uids import CLAIM_SECONDS, UidPool, unusable
from holdfast.runner.users import can_be_private, known_users, user_for
from holdfast.store.migrate import require_current
from holdfast.store.store import Store, connect

LEAST_FREE = 1024**3
CLOCK_SECONDS = 5.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. `fix` is what to do if it failed."""

    what: str
    ok: bool
    text: str
    fix: str | None = None


async def examine(settings: Settings) -> Sequence[Finding]:
    """Run all checks; a check that raises is a finding, not an error."""
    findings = [_checked("supervisor", _supervisor), _checked("state folder", lambda: _state(settings))]
    findings.append(_checked("isolation", lambda: _isolation(settings)))
    findings.append(_checked("runners", _runners))
    findings.append(await _docker(settings))
    try:
        database = await connect(
            settings.url, schema=settings.schema, connections=1, listen=False, pooler=settings.pooler
        )
    except HoldfastError as error:
        fix = "start the database, or set HOLDFAST_DATABASE_URL to its URL"
        return [*findings, Finding(what="database", ok=False, text=error.message, fix=fix), await _server()]
    async with Store(database) as store:
        findings.append(Finding(what="database", ok=True, text=address(settings.url)))
        try:
            await require_current(database)
        except HoldfastError as error:
            fix = "run `holdfast migrate`"
            return [*findings, Finding(what="schema", ok=False, text=error.message, fix=fix), await _server()]
        findings.append(Finding(what="schema", ok=True, text="current"))
        findings.append(await _checked_with_store("shared folder", lambda store: _shared(store, settings), store))
        for what, check in (("clock", _clock), ("workers", _workers)):
            findings.append(await _checked_with_store(what, check, store))
        if settings.auth == "on":
            findings.append(await _checked_with_store("tokens", lambda store: _tokens(store, settings), store))
    return [*findings, await _server()]


def _checked(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (HoldfastError, OSError) as error:
        return Finding(what=what, ok=False, text=str(error))


async def _checked_with_store(what: str, check: Callable[[Store], Awaitable[Finding]], store: Store) -> Finding:
    try:
        return await check(store)
    except HoldfastError as error:
        return Finding(what=what, ok=False, text=error.message)
    except OSError as error:
        return Finding(what=what, ok=False, text=f"{error.filename or ''} {error.strerror}".strip())


def address(url: str) -> str:
    """Return a URL without its password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _supervisor() -> Finding:
    program = supervisor.path()
    done = subprocess.run([program], capture_output=True, check=False, timeout=10)
    if done.returncode != os.EX_USAGE:
        fix = "build it again: python -m holdfast.runner.supervisor.build"
        return Finding(what="supervisor", ok=False, text=f"{program} does not run here", fix=fix)
    return Finding(what="supervisor", ok=True, text=f"{program.stat().st_size // 1024} KiB, runs")


def _state(settings: Settings) -> Finding:
    state = StateFolder(settings.state)
    user_for(settings.process_user, state.path)
    return _room("state folder", state.path)


def _isolation(settings: Settings) -> Finding:
    """Check what isolates the processes of one job from those of another."""
    if os.geteuid() != 0:
        text = "none: the worker is not root, so every process job runs as its user and must be trusted"
        return Finding(what="isolation", ok=True, text=text)
    if settings.process_user is not None:
        text = f"HOLDFAST_PROCESS_USER: all process jobs run as {settings.process_user}, and can reach each other"
        return Finding(what="isolation", ok=True, text=text)
    first, last = settings.uid_range
    problem = unusable(first, last) or _claimed_by_users(first, last)
    if problem is not None:
        fix = "set HOLDFAST_PROCESS_UIDS to a range that no user of this host has"
        return Finding(what="isolation", ok=False, text=problem, fix=fix)
    taken, gone = _uids_in_use(settings)
    text = f"each process attempt has a uid of its own ({settings.process_uids}, {taken} in use)"
    if gone:
        text += f", {gone} of them by attempts of other installations whose folders were removed: remove those links"
    if not can_be_private():
        fix = "give the worker CAP_SYS_ADMIN, or use containers for jobs that do not trust each other"
        text += ", but not a /tmp, shared memory and /proc of its own: mount namespaces are not permitted here"
        return Finding(what="isolation", ok=False, text=text, fix=fix)
    text += ", and a /tmp, shared memory and /proc of its own"
    return Finding(what="isolation", ok=True, text=text)


def _runners() -> Finding:
    """Check that everything that is installed can be loaded."""
    registry.load_plugins()
    text = f"{', '.join(registry.runners())}; connectors: {', '.join(registry.connectors())}"
    return Finding(what="runners", ok=True, text=text)


def _claimed_by_users(first: int, last: int) -> str | None:
    names = known_users(first, last)
    return f"users of this host have uids of HOLDFAST_PROCESS_UIDS: {', '.join(names[:5])}" if names else None


def _uids_in_use(settings: Settings) -> tuple[int, int]:
    """Count the claimed uids, and those claimed from other state folders for attempts whose folders are gone."""
    uids = UidPool(*settings.uid_range, settings.process_uids_dir)
    try:
        claims = list(uids.claims())
    finally:
        uids.close()
    others = [claim for claim in claims if not claim.folder.is_relative_to(settings.state.resolve())]
    return len(claims), sum(claim.age > CLAIM_SECONDS and not claim.folder.exists() for claim in others)


async def _shared(store: Store, settings: Settings) -> Finding:
    """Check that this is the folder that the database names. A folder that was never used is not created."""
    recorded = await store.shared_folder.read()
    found = read_id(settings.shared)
    problem = mismatch(settings.shared, await store.installation(), found, recorded)
    if problem is not None:
        fix = "mount it, or set HOLDFAST_SHARED_DIR; `holdfast shared-folder` shows both"
        return Finding(what="shared folder", ok=False, text=problem, fix=fix)
    if recorded is None and not settings.shared.exists():
        return Finding(what="shared folder", ok=True, text=f"{settings.shared}, made at the first start")
    probe = settings.shared / f".doctor-{os.getpid()}"
    probe.touch()
    probe.unlink()
    return _room("shared folder", settings.shared)


def _room(what: str, path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    text = f"{path}, {free / 1024**3:.1f} GiB free"
    return Finding(what=what, ok=free >= LEAST_FREE, text=text, fix="free some space: attempts and logs need it")


async def _docker(settings: Settings) -> Finding:
    """Check the Docker engine. A machine without one is fine, unless a setting names one."""
    host, usual = settings.docker_host, Settings().docker_host
    if host is None:
        return Finding(what="docker", ok=True, text="off: no containers on this host")
    if host == usual and not _there(host):
        return Finding(what="docker", ok=True, text="no engine found: containers are off until one is started")
    try:
        from holdfast.runner.docker.engine import Engine, EngineError
    except ModuleNotFoundError:
        text = "its client is not installed: no containers on this host"
        return Finding(what="docker", ok=host == usual, text=text, fix="pip install 'holdfast[docker]'")
    engine = Engine(host)
    try:
        found = await engine.info()
        return Finding(what="docker", ok=True, text=f"{host}, engine {found.id[:12]} on {found.host}")
    except (EngineUnreachable, EngineError) as error:
        fix = "start the engine, or set HOLDFAST_DOCKER_HOST to its address, or to none if this host runs no containers"
        return Finding(what="docker", ok=False, text=str(error), fix=fix)
    finally:
        await engine.close()


def _there(host: str) -> bool:
    return Path(host.removeprefix("unix://")).exists()


async def _tokens(store: Store, settings: Settings) -> Finding:
    """Check that there is an admin token that does not expire, and that other users cannot read its file."""
    admins = [token for token in await store.tokens.list() if token.role is Role.ADMIN and token.expires_at is None]
    file = settings.admin_token
    if not admins:
        fix = f"start a server: its first start makes one, in {file}"
        return Finding(what="tokens", ok=False, text="every admin token expires, or there is none", fix=fix)
    if file.exists() and file.stat().st_mode & 0o077:
        return Finding(what="tokens", ok=False, text=f"other users can read {file}", fix=f"chmod 600 {file}")
    return Finding(what="tokens", ok=True, text=f"{len(admins)} of admins")


async def _clock(store: Store) -> Finding:
    before = datetime.now(UTC)
    database_time = (await store.leases.owners()).now_at
    off = (database_time - before).total_seconds()
    text = f"the clock of the database is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
    fix = "let a time service set this host's clock; leases follow the database's, so jobs are safe meanwhile"
    return Finding(what="clock", ok=abs(off) < CLOCK_SECONDS, text=text, fix=fix)


async def _workers(store: Store) -> Finding:
    live = [worker for worker in await store.workers.list() if worker.live]
    text = f"{len(live)} live" if live else "no live worker: jobs wait"
    return Finding(what="workers", ok=bool(live), text=text, fix="start one: `holdfast worker`")


async def _server() -> Finding:
    async with AsyncClient(tries=1) as client:
        try:
            async with asyncio.timeout(5):
                await client.request("GET", "/v1/queues")
        except (ServerUnreachable, TimeoutError):
            fix = "start it: `holdfast up` or `holdfast serve`; or set HOLDFAST_URL"
            return Finding(what="server", ok=False, text=f"{client.url} does not answer", fix=fix)
        except Refused as error:
            fix = "set HOLDFAST_TOKEN, or run where the server's data folder is"
            return Finding(what="server", ok=False, text=f"{client.url}: {error.message}", fix=fix)
        return Finding(what="server", ok=True, text=f"{client.url}, the token is valid")
