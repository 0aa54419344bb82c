"""The uids of attempts: claimed exclusively on the whole host, freed when nothing of the attempt is left."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.runner import supervisor
from holdfast.runner.attempt_users import AttemptUsers
from holdfast.runner.leftovers import find_leftovers, kill_leftovers
from holdfast.runner.uids import UidPool, UidsExhausted, unusable
from tests.support.supervisor_harness import needs_root

FIRST = 2_100_000_000


def attempt_in(folder: Path, uid: int | None = None) -> Path:
    """An attempt's folder; its `work` belongs to the uid."""
    (folder / "work").mkdir(parents=True)
    if uid is not None:
        os.chown(folder / "work", uid, uid)
    return folder


def test_a_uid_is_claimed_once(tmp_path: Path) -> None:
    """Also by two installations, and with ranges that overlap. Proves I1."""
    one = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    other = UidPool(FIRST + 10, FIRST + 30, tmp_path / "uids")
    claimed = [one.claim(tmp_path / f"a.{n}") for n in range(21)] + [
        other.claim(tmp_path / f"b.{n}") for n in range(10)
    ]
    assert len(set(claimed)) == 31
    for uids in (one, other):
        with pytest.raises(UidsExhausted, match="uids of HOLDFAST_PROCESS_UIDS"):
            uids.claim(tmp_path / "c.1")


def test_processes_that_claim_at_the_same_time_get_different_uids(tmp_path: Path) -> None:
    """Proves I1."""
    script = (
        "import sys; from pathlib import Path; from holdfast.runner.uids import UidPool\n"
        f"uids = UidPool({FIRST}, {FIRST + 199}, Path(sys.argv[1]))\n"
        "for n in range(50): print(uids.claim(Path(sys.argv[2]) / f'{n}.1'))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path / "uids", f"/site/{n}"], stdout=subprocess.PIPE)
        for n in range(4)
    ]
    claimed = [uid for process in processes for uid in process.communicate()[0].split()]
    assert len(claimed) == len(set(claimed)) == 200


def test_the_record_of_a_claim_names_the_attempt(tmp_path: Path) -> None:
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    attempt = tmp_path / "site" / "job.1"
    uid = uids.claim(attempt)
    assert uids.owner(uid) == attempt
    assert [claim.uid for claim in uids.claims(tmp_path / "site")] == [uid]
    assert list(uids.claims(tmp_path / "other")) == []


@needs_root
def test_an_adopter_finds_the_uid_by_the_folder(tmp_path: Path) -> None:
    """A folder whose owner's claim is another attempt's has no uid of its own. Proves I1."""
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    attempt = tmp_path / "site" / "job.1"
    uid = uids.claim(attempt)
    assert uids.of(attempt) is None
    attempt_in(attempt, uid)
    assert UidPool(FIRST, FIRST + 20, tmp_path / "uids").of(attempt) == uid
    assert uids.of(attempt_in(tmp_path / "site" / "other.1", uid)) is None


@needs_root
def test_a_uid_is_not_freed_while_its_folder_is_there(tmp_path: Path) -> None:
    """Proves I1."""
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    attempt = tmp_path / "site" / "job.1"
    uid = uids.claim(attempt)
    attempt_in(attempt, uid)
    assert not uids.free(uid, attempt)
    (attempt / "work").rmdir()
    assert uids.free(uid, attempt)
    assert not uids.free(uid, attempt)


def test_only_its_owner_frees_a_uid(tmp_path: Path) -> None:
    """The slower of two processes that free the same uid does not free it again for its next owner."""
    uids = UidPool(FIRST, FIRST, tmp_path / "uids")
    first, second = tmp_path / "site" / "first.1", tmp_path / "site" / "second.1"
    uid = uids.claim(first)
    assert uids.free(uid, first)
    assert uids.claim(second) == uid
    assert not uids.free(uid, first)
    assert uids.owner(uid) == second


def test_stopped_holder_of_the_lock_delays_others_only_briefly(tmp_path: Path) -> None:
    """What could not be freed then is left to the sweep."""
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    attempt = tmp_path / "site" / "job.1"
    uid = uids.claim(attempt)
    with (tmp_path / "uids" / "lock").open() as sleeper:
        fcntl.flock(sleeper, fcntl.LOCK_EX)
        assert not uids.free(uid, attempt)
    assert uids.free(uid, attempt)


def test_a_claim_whose_owner_was_killed_before_it_made_the_folder_is_stale(tmp_path: Path) -> None:
    """But not while the folder is half made, nor while it could still be made. Proves I1."""
    site = tmp_path / "site"
    site.mkdir()
    script = (
        "import os, signal, sys; from pathlib import Path; from holdfast.runner.uids import UidPool\n"
        f"UidPool({FIRST}, {FIRST + 20}, Path(sys.argv[1])).claim(Path(sys.argv[2]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "uids", site / "job.1"], check=False)
    assert done.returncode == -signal.SIGKILL
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    assert uids.stale(site) == []
    (half,) = [site / ".job.1.abcdef01"]
    half.mkdir()
    assert uids.stale(site, older=-1) == []
    half.rmdir()
    (claim,) = uids.stale(site, older=-1)
    assert claim.folder == site / "job.1"
    assert uids.free(claim.uid, claim.folder)


@needs_root
def test_a_claim_in_use_is_never_stale(tmp_path: Path) -> None:
    """Proves I1."""
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    site = tmp_path / "site"
    used = uids.claim(site / "used.1")
    attempt_in(site / "used.1", used)
    spare = uids.claim(site / "used.1")  # Of a worker that lost the race to make the folder.
    assert [claim.uid for claim in uids.stale(site, older=-1)] == [spare]


def test_a_claim_that_a_crash_of_the_machine_lost_is_made_again(tmp_path: Path) -> None:
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    attempt = tmp_path / "site" / "job.1"
    assert uids.reclaim(FIRST + 7, attempt)
    assert uids.reclaim(FIRST + 7, attempt)
    assert not uids.reclaim(FIRST + 7, tmp_path / "site" / "other.1")


def test_the_folder_of_the_uids_is_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        UidPool(FIRST, FIRST + 20, tmp_path / "new" / "uids").close()
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o711
    assert (tmp_path / "new" / "uids").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="HOLDFAST_PROCESS_UIDS_DIR"):
        UidPool(FIRST, FIRST + 20, tmp_path / "file" / "uids")


@needs_root
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "uids").mkdir()
    os.chown(tmp_path / "uids", 65532, 65532)
    with pytest.raises(ConfigError, match="belongs to uid 65532"):
        UidPool(FIRST, FIRST + 20, tmp_path / "uids")


def test_a_range_that_is_not_mapped_here_is_refused() -> None:
    assert unusable(FIRST, FIRST + 65_535) is None
    assert "HOLDFAST_PROCESS_UIDS" in (unusable(FIRST, 2**32) or "")


def sleeping(uid: int) -> "subprocess.Popen[bytes]":
    """A process of a user, in a session of its own."""
    return subprocess.Popen(["sleep", "600"], user=uid, group=uid, extra_groups=(), env={}, start_new_session=True)


@needs_root
def test_everything_of_a_uid_is_killed_and_nothing_else() -> None:
    """Proves I1."""
    mine, other = sleeping(FIRST + 1), sleeping(FIRST + 2)
    try:
        assert find_leftovers(None, uid=FIRST + 1) == [mine.pid]
        assert kill_leftovers(None, uid=FIRST + 1) == []
        assert mine.wait(10) == -signal.SIGKILL
        assert other.poll() is None
        refused = subprocess.run([supervisor.path(), "--kill-user", "0"], capture_output=True, check=False)
        assert refused.returncode == os.EX_USAGE
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


@needs_root
def test_sweep_kills_the_processes_of_a_uid_before_it_frees_it(tmp_path: Path) -> None:
    """As after a crash between the removal of a folder and the end of its claim. Proves I1."""
    site = tmp_path / "site"
    buried = site / "job.1"
    buried.mkdir(parents=True)
    (buried / "started").touch()
    uids = UidPool(FIRST, FIRST + 20, tmp_path / "uids")
    users = AttemptUsers(None, uids, site)
    uid, used = uids.claim(buried), uids.claim(site / "used.1")
    attempt_in(site / "used.1", used)
    left, running = sleeping(uid), sleeping(used)
    try:
        assert users.sweep(older=3600) == 0
        assert users.sweep(older=-1) == 1
        assert left.wait(10) == -signal.SIGKILL
        assert running.poll() is None
        assert [claim.uid for claim in uids.claims()] == [used]
    finally:
        for process in (left, running):
            process.kill()
            process.wait()


@needs_root
def test_without_namespaces_files_of_a_uid_are_removed_before_it_is_freed(tmp_path: Path) -> None:
    """Files in open places, links not followed, and System V shared memory. Proves I1."""
    uids = UidPool(FIRST + 40, FIRST + 60, tmp_path / "uids", private=False)
    attempt = tmp_path / "site" / "job.1"
    uid = uids.claim(attempt)
    name = f"holdfast-test-{os.urandom(4).hex()}"
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "file").touch()
    script = (
        f"mkdir /tmp/{name} && touch /tmp/{name}/file /var/tmp/{name} /dev/shm/{name} && ln -s {keep} /tmp/{name}-link "
        "&& ipcmk -M 4096 >/dev/null"
    )
    subprocess.run(["sh", "-ec", script], user=uid, group=uid, extra_groups=(), check=True)
    assert str(uid) in Path("/proc/sysvipc/shm").read_text()
    assert uids.free(uid, attempt)
    places = (f"/tmp/{name}", f"/tmp/{name}-link", f"/var/tmp/{name}", f"/dev/shm/{name}")
    assert not [place for place in places if os.path.lexists(place)]
    assert str(uid) not in Path("/proc/sysvipc/shm").read_text()
    assert (keep / "file").exists()


@needs_root
def test_a_host_that_does_not_permit_namespaces_is_recognised() -> None:
    probe = [str(supervisor.path()), "--probe-private"]
    assert subprocess.run(probe, check=False).returncode == 0
    assert subprocess.run(["setpriv", "--bounding-set=-sys_admin", *probe], check=False).returncode != 0
