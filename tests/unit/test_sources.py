"""The files that tasks name: SQL expanded as by psql, declared files by content, nothing outside the folder."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest

from holdfast.duties.upload_cleaner import UploadCleaner
from holdfast.errors import Invalid, TooLarge
from holdfast.pipeline import sources
from holdfast.pipeline.sources import Sources, inputs_of
from holdfast.runner.folder_artifacts import FolderArtifacts
from tests.support.cluster import binaries
from tests.support.pipelines import open_folder
from tests.support.store_harness import StoreHarness
from tests.support.supervisor_harness import needs_root
from tests.support.users import as_nobody

FIELD = "tasks[0].sql"


def write(root: Path, **files: str) -> Sources:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".sql").write_text(text)
    return Sources(root)


def test_includes_are_expanded_from_the_folder_and_from_the_including_file(tmp_path: Path) -> None:
    """Proves P3."""
    files = write(
        tmp_path,
        main="SELECT 1;\n\\ir sub/a.sql\nSELECT 4; \\i sub/c.sql\n",
        sub__a="SELECT 2;\n\\include_relative 'b.sql'",
        sub__b="SELECT 3;",
        sub__c="SELECT 5;",
    )
    assert files.sql(FIELD, "main.sql")[0].split() == [word for n in range(1, 6) for word in ("SELECT", f"{n};")]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT '\n\\i no.sql\n';",
        "SELECT E'it\\'s\n\\i no.sql\n';",
        'SELECT 1 AS "\n\\i no.sql\n";',
        "DO $x$\n\\i no.sql\n$x$;",
        "-- \\i no.sql\n",
        "/* /* \\i no.sql */ \n\\i no.sql\n*/",
        "COPY t FROM stdin;\n\\i no.sql\n\\.\n",
        "\\copy t from no.csv \\i no.sql\n",
        "SELECT 'never closed\n\\i no.sql\n",
        "\\if true\n\\endif\n\\set x 1\n",
    ],
)
def test_sql_that_psql_does_not_expand_is_left_unchanged(tmp_path: Path, text: str) -> None:
    """Proves P3."""
    assert write(tmp_path, main=text).sql(FIELD, "main.sql")[0] == text


@pytest.mark.parametrize(
    "text", ["SELECT 1 \\; SELECT 2;\n\\i b.sql\n", "\\echo x \\i b.sql\n", "SELECT $1; \\i b.sql\n"]
)
def test_include_after_other_commands_is_found(tmp_path: Path, text: str) -> None:
    assert "SELECT 'b';" in write(tmp_path, main=text, b="SELECT 'b';").sql(FIELD, "main.sql")[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no file main.sql"),
        ({"main": "\\i gone.sql\n"}, "there is no file gone.sql"),
        ({"main": "\\i main.sql\n"}, "in a circle: main.sql → main.sql"),
        ({"main": "\\i a.sql\n", "a": "\\ir b.sql\n", "b": "\\i a.sql\n"}, "in a circle: a.sql → b.sql → a.sql"),
        ({"main": "\\i :name\n"}, "cannot be read without running it"),
        ({"main": "\\i `ls`\n"}, "cannot be read without running it"),
        ({"main": "\\i ../other.sql\n"}, r"there is no file|leads out of"),
    ],
)
def test_sql_that_cannot_be_known_is_refused_by_name(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=message) as refused:
        write(tmp_path, **files).sql(FIELD, "main.sql")
    assert refused.value.field == FIELD


def test_includes_that_multiply_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_SQL", 10_000)
    names = [f"f{n}" for n in range(30)]
    files = {name: f"\\i {after}.sql\n" * 2 for name, after in itertools.pairwise(names)}
    with pytest.raises(TooLarge):
        write(tmp_path, **files, **{names[-1]: "x"}).sql(FIELD, "f0.sql")


@needs_root
def test_unreadable_file_is_refused_with_the_reason() -> None:
    """Proves P10: a missing right is not our own fault, and not a missing file."""
    with open_folder() as top:
        files = write(top, main="\\i shut.sql\n", shut="SELECT 1;", folder__a="SELECT 1;")
        (top / "shut.sql").chmod(0)
        (top / "folder").chmod(0)
        for path in ("shut.sql", "folder/a.sql"):
            with as_nobody(), pytest.raises(Invalid, match=rf"field: {path} cannot be read: Permission denied"):
                files.declared("field", path)
        with as_nobody(), pytest.raises(Invalid, match=r"shut.sql cannot be read: Permission denied"):
            files.sql(FIELD, "main.sql")


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    """Proves N5."""
    inside = tmp_path / "inputs"
    inside.mkdir()
    (tmp_path / "secret").write_text("s")
    (inside / "link").symlink_to("../secret")
    (inside / "plain").write_text("p")
    (inside / "also").symlink_to("plain")
    os.mkfifo(inside / "fifo")
    files = Sources(inside)
    assert files.declared("f", "also").size == 1
    for path in ("../secret", "link", str(tmp_path / "secret"), "fifo", ".", "a\0b", "x" * 5000):
        with pytest.raises(Invalid):
            files.declared("f", path)


@pytest.mark.parametrize("tenant", ["..", ".", "a/../b", "%2E", "blue"])
def test_every_tenant_has_a_folder_of_its_own(tmp_path: Path, tenant: str) -> None:
    """Proves N5."""
    folder = inputs_of(tmp_path, tenant)
    assert folder.resolve().parent == (tmp_path / "sources").resolve()
    assert folder != inputs_of(tmp_path, "default")


def test_declared_file_that_changed_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "seed.csv").write_text("1")
    files = Sources(tmp_path)
    declared = files.declared("f", "seed.csv")
    files.copy("f", declared, tmp_path / "out" / "seed.csv")
    assert (tmp_path / "out" / "seed.csv").read_text() == "1"
    (tmp_path / "seed.csv").write_text("2")
    with pytest.raises(Invalid, match=r"seed.csv changed since the plan was made"):
        files.copy("f", declared, tmp_path / "out" / "seed.csv")
    assert not (tmp_path / "out" / "seed.csv").exists()


def test_psql_answers_the_same_to_the_files_and_to_the_expanded_text(tmp_path: Path, server: str) -> None:
    """Proves P3."""
    files = write(
        tmp_path,
        main="SELECT 'it''s\n\\i no.sql' AS a; \\ir sub/a.sql\nSELECT $x$\n\\i no.sql\n$x$ AS b;\n\\echo x \\i b.sql\n",
        sub__a="CREATE TEMP TABLE t (a text);\nCOPY t FROM stdin;\n\\\\i no.sql\n\\.\nSELECT * FROM t;\n\\ir ../b.sql",
        b="/* /* \\i no.sql */ \\i no.sql */ SELECT 'b' \\; SELECT E'\\'\\\\i no.sql';",
    )
    psql = [str(binaries() / "psql"), "-X", "-v", "ON_ERROR_STOP=1", "-d", server]

    def said(*arguments: str, text: str | None = None) -> str:
        done = subprocess.run([*psql, *arguments], cwd=tmp_path, input=text, capture_output=True, text=True, check=True)
        return done.stdout

    assert said("-f", "main.sql") == said(text=files.sql(FIELD, "main.sql")[0])


async def test_sweep_of_uploads_leaves_what_pipelines_read(harness: StoreHarness, tmp_path: Path) -> None:
    """Proves N5."""
    read = inputs_of(tmp_path, "default") / "schema.sql"
    read.parent.mkdir(parents=True)
    read.write_text("SELECT 1;")
    await UploadCleaner(harness.store, FolderArtifacts(tmp_path), grace=-1, day=-1).run_once()
    assert read.exists()
    assert inputs_of(tmp_path, "default").parent not in {tmp_path / "inputs", tmp_path / "uploads"}
