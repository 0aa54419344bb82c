"""The README's example does what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_example_runs_as_printed(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "{'text': 'Hello Ada'}"


def test_tests_that_the_readme_names_exist() -> None:
    text = README.read_text()
    sources = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in sources, name
    for name in re.findall(r"`(tests/\w+\.py)`", text):
        assert (README.parent / name).exists(), name
