"""Plans: golden identities, what they depend on and what not, and what a miss says."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Invalid
from holdfast.pipeline import identity
from holdfast.pipeline.identity import KnownSnapshot, explain, hash_fields, nearest, root_of, snapshot_id, task_hash
from holdfast.pipeline.plan import PipelinePlan, PlanFacts, make_plan, stage_files
from holdfast.pipeline.sources import Sources
from holdfast.submission import check, parse

TASKS: list[dict[str, Any]] = [
    {"name": "schema", "sql": "schema.sql"},
    {"name": "seed", "command": ["sh", "-c", "load seed.csv"], "files": ["seed.csv"], "env": {"ROWS": "3"}},
]
FACTS = PlanFacts(engine="postgres 15.8")


def spec_of(**fields: Any) -> dict[str, Any]:
    job = {"runner": "process", "tasks": TASKS, "connector": "postgres", **fields}
    return check(parse(job), "default").spec


@pytest.fixture
def files(tmp_path: Path) -> Sources:
    (tmp_path / "schema.sql").write_text("CREATE TABLE t (a int);\n\\ir more.sql\n")
    (tmp_path / "more.sql").write_text("CREATE TABLE u (b int);\n")
    (tmp_path / "seed.csv").write_text("1\n2\n3\n")
    return Sources(tmp_path)


def made(files: Sources, facts: PlanFacts = FACTS, *, tenant: str = "default", **fields: Any) -> PipelinePlan:
    inputs = fields.pop("inputs", {})
    return make_plan(spec_of(**fields), files, facts, tenant=tenant, inputs=inputs)


def test_identities_are_the_golden_ones(files: Sources) -> None:
    """Proves P3."""
    assert hash_fields(["a1", "2"]) == "e13497e14a7d0bb03e9f8256bc7ca3095442f0ce742facd47088d685794c3d71"
    assert root_of("default") == "5fac9d9103f9e1a65aee00ddde20db9e8cafc04ff8f08b5064d5cbc6597c1a46"
    assert task_hash({"b": "2", "a": "1"}) == "aeffb5fe906e527a4c39e46a7caf220ec5f4a0bb74d74ad194e443d3b346c2ff"
    assert (
        snapshot_id(root_of("default"), task_hash({}))
        == "473d8ab477f88eb9d4218c3e4010c1ef0906ddca59e9e0c72fca911de12a0462"
    )
    assert [task.snapshot for task in made(files).tasks] == [
        "66fd6165557eb93403e16db890796ee1a6f2ccc2dbafafc8e6d7b06f176d00b2",
        "560ec881fd767a12d7feedc2862edffd8ef88a16b72d592ea2fab4d94852b6be",
    ]
    assert made(files).tasks[1].components == {
        "schema": "2",
        "connector": "postgres 1",
        "engine": "postgres 15.8",
        "command": "6ce67b902ea757c41a60ddf8c4f86de8b836f2a68526b56dab879fa58ddf0aeb",
        "files[0]": "14c5e74c4b96ccef41cd94db73a9ec3348038ac094feca4fd897cecffa07cdae",
        "env.ROWS": "37d7d5bb36404d163a8a96b5f4a4f7b4393dd70d6f5faead0c7e9e0fb82b4d9b",
    }


def test_identity_separates_its_fields() -> None:
    """Proves P3."""
    assert hash_fields(["a1", "2"]) != hash_fields(["a", "12"])
    assert hash_fields(["a"]) != hash_fields(["a", ""])
    assert task_hash({"a": "b"}) != task_hash({"a": "", "b": ""})


def test_names_and_paths_are_no_part_of_an_identity(files: Sources) -> None:
    """Proves P3."""
    before = made(files)
    (files.root / "seed.csv").rename(files.root / "rows.csv")
    (files.root / "sql").mkdir()
    for name in ("schema.sql", "more.sql"):
        (files.root / name).rename(files.root / "sql" / name)
    tasks = [{"name": "1", "sql": "sql/schema.sql"}, {**TASKS[1], "name": "2", "files": ["rows.csv"]}]
    assert [task.snapshot for task in made(files, tasks=tasks).tasks] == [task.snapshot for task in before.tasks]


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": [TASKS[0], {**TASKS[1], "command": ["sh", "-c", "load", "seed.csv"]}]},
        {"tasks": [TASKS[0], {**TASKS[1], "env": {"ROWS": "4"}}]},
        {"tasks": [TASKS[0], {**TASKS[1], "files": []}]},
        {"tasks": [TASKS[0], {**TASKS[1], "files": ["seed.csv", "seed.csv"]}]},
        {"spec": {"env": {"A": "1"}}},
        {"base": "0" * 64},
        {"tenant": "blue"},
        {"facts": PlanFacts(engine="postgres 16.0")},
        {"inputs": {"rows": 3}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_matters_changes_the_last_identity(files: Sources, change: dict[str, Any]) -> None:
    """Proves P3."""
    assert made(files, **change).hash != made(files).hash


@pytest.mark.parametrize("name", ["seed.csv", "schema.sql", "more.sql"])
def test_content_changes_an_identity_and_all_later_ones(files: Sources, name: str) -> None:
    """Proves P3."""
    before = made(files)
    with (files.root / name).open("a") as file:
        file.write("-- 4\n")
    after = made(files)
    assert after.tasks[1].snapshot != before.tasks[1].snapshot
    assert (after.tasks[0].snapshot == before.tasks[0].snapshot) is (name == "seed.csv")


def test_inputs_are_part_of_every_identity_in_whatever_order_they_stand(files: Sources) -> None:
    """Proves P3: tasks find them in `request.json`."""
    first, second, other = (
        made(files, inputs=inputs) for inputs in ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": 1, "b": [3]})
    )
    assert first.tasks[0].components["inputs"] == "50aa8c2fb29a3092034a234d79d9f8badf209092bf63974ad81f70ad33c53dd2"
    assert first.hash == second.hash
    assert not {task.snapshot for task in first.tasks} & {task.snapshot for task in (*other.tasks, *made(files).tasks)}


def test_version_of_the_schema_is_part_of_every_identity(files: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves P3."""
    before = made(files)
    monkeypatch.setattr("holdfast.pipeline.plan.SCHEMA", "3")
    assert not {task.snapshot for task in made(files).tasks} & {task.snapshot for task in before.tasks}


def test_limits_are_no_part_of_an_identity(files: Sources) -> None:
    """Proves P3."""
    tasks = [TASKS[0], {**TASKS[1], "timeout": 5}]
    assert made(files, tasks=tasks, timeout=60).hash == made(files).hash


def test_names_of_secrets_are_part_of_every_identity(files: Sources) -> None:
    """Proves P3, D1: a task sees which secrets there are. Their values are not hashed."""
    spec = spec_of()

    def ids(*secrets: str) -> list[str]:
        found = make_plan(spec, files, FACTS, tenant="default", inputs={}, secrets=secrets)
        return [task.snapshot for task in found.tasks]

    assert ids() == [task.snapshot for task in made(files).tasks]
    assert ids("A", "B") == ids("B", "A", "A")
    assert not {*ids("A")} & ({*ids()} | {*ids("A", "B")})


def test_image_counts_by_its_digest_and_must_resolve(files: Sources) -> None:
    """Proves P3."""
    job: dict[str, Any] = {"runner": "docker", "spec": {"image": "postgres:15"}}
    first, second = (made(files, PlanFacts(image=f"sha256:{n}"), **job) for n in "12")
    assert first.hash != second.hash
    with pytest.raises(Invalid, match="postgres:15 does not resolve"):
        made(files, PlanFacts(), **job)


def test_sql_runs_as_it_was_hashed(files: Sources) -> None:
    (task, _) = made(files).tasks
    (files.root / "more.sql").write_text("DROP TABLE t;")
    assert task.sql == "CREATE TABLE t (a int);\nCREATE TABLE u (b int);\n\n"


def test_declared_files_are_staged_under_their_paths(files: Sources, tmp_path: Path) -> None:
    tasks = [{"name": "one", "command": ["true"], "files": ["seed.csv", "./sub/../more.sql"]}]
    (files.root / "sub").mkdir()
    (task,) = made(files, tasks=tasks).tasks
    stage_files(task, files, tmp_path / "work")
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["more.sql", "seed.csv"]
    (files.root / "seed.csv").write_text("other")
    with pytest.raises(Invalid, match=r"tasks\[0\].files\[0\]: seed.csv changed"):
        stage_files(task, files, tmp_path / "again")


@pytest.mark.parametrize(("mode", "kept"), [("always", [True, True]), ("final", [False, True]), ("none", [False] * 2)])
def test_mode_says_what_is_kept(files: Sources, mode: str, kept: list[bool]) -> None:
    assert [task.keep for task in made(files, snapshot=mode).tasks] == kept
    assert made(files, snapshot=mode).hash == made(files).hash


def test_latest_snapshot_decides_where_to_continue(files: Sources) -> None:
    """Proves P2."""
    found = made(files)
    first, second = (task.snapshot for task in found.tasks)
    assert [found.latest(set(known)) for known in ((), (first,), (second,), (first, second))] == [0, 1, 2, 2]


def test_miss_names_the_components_that_differ(files: Sources) -> None:
    """Proves P10."""
    known = [
        KnownSnapshot(id=task.snapshot, parent=task.parent, components=task.components) for task in made(files).tasks
    ]
    (files.root / "seed.csv").write_text("4\n")
    tasks = [TASKS[0], {**TASKS[1], "env": {}}]
    task = made(files, tasks=tasks).tasks[1]
    miss = nearest(task.components, task.parent, known)
    assert miss is not None
    assert miss.nearest == known[1].id
    assert [(one.component, one.change) for one in miss.differs] == [("env.ROWS", "removed"), ("files[0]", "changed")]
    assert explain(miss) == f"nearest is {known[1].id[:12]}: env.ROWS removed, files[0] changed"
    assert explain(nearest(task.components, task.parent, [])) == "no snapshot is known yet"
    assert identity.PARENT in [one.component for one in identity.differences(task.components, "x", known[1])]


@pytest.mark.parametrize(
    ("job", "field", "message"),
    [
        ({"tasks": [{"name": "a"}]}, r"tasks[0]", "needs one of: command, sql"),
        ({"tasks": [{"name": "a", "command": ["x"], "sql": "y"}]}, r"tasks[0]", "needs one of"),
        ({"tasks": [{"name": "a", "command": []}]}, r"tasks[0].command", "length"),
        ({"tasks": [{"name": "a", "command": ["x"], "retries": 1}]}, r"tasks[0].retries", "unknown field"),
        ({"tasks": [{"name": "a", "command": ["x"]}] * 2}, r"tasks[1].name", "given once"),
        ({"tasks": [{"name": "a", "sql": "x"}], "connector": "files"}, r"tasks[0].sql", "no server for SQL"),
        ({"connector": "mysql"}, "connector", "mysql"),
        ({"snapshot": "sometimes"}, "snapshot", "sometimes"),
        ({"base": "abc"}, "base", "regex"),
        ({"runner": "function", "spec": {"name": "f"}}, "tasks", "not as function"),
        ({"runner": "docker"}, "spec.image", "required"),
        ({"tasks": [], "spec": {"command": ["x"]}}, "connector", "give tasks"),
        ({"spec": {"tasks": []}}, "spec.tasks", "given twice"),
    ],
)
def test_bad_pipelines_are_refused_by_field(job: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(Invalid, match=message) as refused:
        spec_of(**job)
    assert refused.value.field == field
