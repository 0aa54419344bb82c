"""The registry: what is built in, what is installed, and what is refused."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import registry
from holdfast.errors import ConfigError, FieldForbidden, Forbidden, Invalid
from holdfast.privileges import refuse_privileged, refuse_raw
from holdfast.runner_specs import capability_of, check_spec
from holdfast.submission import check, parse
from tests.support.plugins import distribution, installed, runner_module

ONE = {"shout": "shout_runner:DESCRIPTOR"}


def problems(folder: Path) -> tuple[str, ...]:
    with installed(folder), pytest.raises(ConfigError) as caught:
        registry.load_plugins()
    return caught.value.problems


def test_the_registry_imports_nothing_that_runs_attempts() -> None:
    """A server or a client checks jobs of every runner without the runner."""
    script = """
import sys
from holdfast.submission import check, parse
check(parse({"runner": "docker", "spec": {"image": "a"}}), "default")
print([name for name in sys.modules if name.startswith("holdfast.runner.") and not name.endswith("descriptor")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    folders = {where.rpartition(".")[0] for where in registry.BUILT_IN_RUNNERS} - {"holdfast.runner"}
    assert set(ast.literal_eval(done.stdout)) == folders


def test_an_unknown_runner_or_connector_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Invalid, match="runner: 'shout' is not a runner here; known are function, process, docker"):
        check(parse({"runner": "shout", "spec": {}}), "default")
    tasks = [{"name": "one", "command": ["true"]}]
    with pytest.raises(Invalid, match="connector: 'x' is not a connector here; known are files, "):
        check(parse({"runner": "process", "tasks": tasks, "connector": "x"}), "default")


def test_an_installed_runner_is_checked_by_its_own_spec(tmp_path: Path) -> None:
    distribution(tmp_path, "holdfast-shout", ONE, runner_module("shout"))
    with installed(tmp_path):
        check_spec("shout", {"text": "true"})
        assert capability_of("shout", {"text": "true"}) == "shout"
        for spec, field in (({}, "spec.text"), ({"text": 1}, "spec.text"), ({"text": "", "x": 1}, "spec.x")):
            with pytest.raises(Invalid) as caught:
                check_spec("shout", spec)
            assert caught.value.field == field
        with pytest.raises(Invalid, match="a pipeline runs as process or docker, not as shout"):
            check_spec("shout", {"tasks": [{"name": "a", "command": ["true"]}]})
    with pytest.raises(Invalid, match="not a runner here"):
        check_spec("shout", {"text": "true"})
    assert capability_of("shout", {"text": "true"}) == "shout", "a job of a runner that is gone can still be explained"


def test_an_installed_runner_is_privileged_unless_it_says_otherwise(tmp_path: Path) -> None:
    """Its jobs, and every field of them that it does not declare open. Proves I1, O8."""
    distribution(tmp_path, "holdfast-shout", ONE, runner_module("shout"))
    open_module = runner_module("whisper", 'privileged=False, open_fields=frozenset({"text"})')
    distribution(tmp_path, "holdfast-whisper", {"whisper": "whisper_runner:DESCRIPTOR"}, open_module)
    with installed(tmp_path):
        with pytest.raises(Forbidden, match="runner shout need an admin's token or HOLDFAST_ALLOW_RAW; use a tool"):
            refuse_raw("shout")
        refuse_raw("whisper")
        for runner, spec, field in (("shout", {"text": "a"}, "text"), ("whisper", {"text": "a", "loud": True}, "loud")):
            with pytest.raises(FieldForbidden) as caught:
                refuse_privileged(runner, spec, {})
            assert caught.value.field == f"spec.{field}"
        refuse_privileged("whisper", {"text": "a", "loud": None}, {})


def test_a_broken_distribution_is_one_line_that_names_it_and_the_way_out(tmp_path: Path) -> None:
    distribution(tmp_path, "holdfast-gone", {"gone": "no_such_module:DESCRIPTOR"})
    distribution(tmp_path, "holdfast-odd", {"odd": "odd_runner:DESCRIPTOR"}, {"odd_runner.py": "DESCRIPTOR = 1\n"})
    distribution(tmp_path, "holdfast-sick", {"sick": "sick_runner:X"}, {"sick_runner.py": "1 / 0\n"})
    distribution(tmp_path, "holdfast-lost", {"lost": "gone:X"}, group=registry.CONNECTORS)
    found = problems(tmp_path)
    assert found == (
        "runner gone of holdfast-gone 1.2 cannot be loaded (ModuleNotFoundError: No module named 'no_such_module'): "
        "repair it or uninstall holdfast-gone",
        "runner odd of holdfast-odd 1.2 cannot be loaded (TypeError: odd_runner:DESCRIPTOR is a int, not a "
        "RunnerDescriptor): repair it or uninstall holdfast-odd",
        "runner sick of holdfast-sick 1.2 cannot be loaded (ZeroDivisionError: division by zero): repair it or "
        "uninstall holdfast-sick",
        "connector lost of holdfast-lost 1.2 cannot be loaded (ModuleNotFoundError: No module named 'gone'): repair "
        "it or uninstall holdfast-lost",
    )


def test_a_name_is_used_once(tmp_path: Path) -> None:
    """A distribution cannot replace a built-in runner, nor that of another distribution."""
    distribution(tmp_path, "holdfast-mine", {"process": "process_runner:DESCRIPTOR"}, runner_module("process"))
    distribution(tmp_path, "holdfast-a", ONE, runner_module("shout"))
    distribution(tmp_path, "holdfast-b", ONE)
    mine, second = problems(tmp_path)
    assert "runner process of holdfast-mine 1.2" in mine
    assert "the name is used by holdfast itself" in mine
    assert "runner shout of holdfast-b 1.2" in second
    assert "the name is used by holdfast-a 1.2" in second


@pytest.mark.parametrize(
    ("entry", "more", "why"),
    [
        ("other", "", "describes 'shout': the entry point must have the same name"),
        ("shout", 'open_fields=frozenset({"x"})', "open_fields names x, which its spec does not have"),
        ("shout", 'named_by="text"', "named_by"),
    ],
)
def test_a_descriptor_that_cannot_work_is_refused(tmp_path: Path, entry: str, more: str, why: str) -> None:
    distribution(tmp_path, "holdfast-shout", {entry: "shout_runner:DESCRIPTOR"}, runner_module("shout", more))
    (found,) = problems(tmp_path)
    assert why in found


def test_a_spec_that_takes_unknown_fields_is_refused(tmp_path: Path) -> None:
    """The field check of a privileged caller relies on it."""
    loose = {file: text.replace("forbid_unknown_fields=True", "") for file, text in runner_module("shout").items()}
    distribution(tmp_path, "holdfast-shout", ONE, loose)
    (found,) = problems(tmp_path)
    assert "forbid_unknown_fields=True" in found


def test_a_name_that_the_database_would_refuse_is_refused(tmp_path: Path) -> None:
    distribution(tmp_path, "holdfast-shout", {"Shout": "Shout_runner:DESCRIPTOR"}, runner_module("Shout"))
    (found,) = problems(tmp_path)
    assert "lower-case letters" in found
