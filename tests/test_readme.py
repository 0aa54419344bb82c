"""The README's example does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


CODE = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(*arguments: str, cwd: Path) -> str:
    """Run Python as a reader would, where these tests find the package."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    env["HOLDFAST_PROCESS_USER"] = "root"
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_application_runs_as_printed(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CODE[0])
    holdfast = ("-m", "holdfast.cli.main")
    run(*holdfast, "migrate", "--database-url", "sqlite:///shop.db", cwd=tmp_path)
    submit = "async with app: print((await app.submit(greet, name='Ada')).id)"
    job = run(
        "-c", f"import asyncio\nfrom shop import *\nasync def main():\n  {submit}\nasyncio.run(main())", cwd=tmp_path
    )
    run(*holdfast, "worker", "--app", "shop:app", "--queue", "default:4", "--once", cwd=tmp_path)
    look = f"async with app: print((await app.store.jobs.get('{job.strip()}')).result)"
    said = run(
        "-c", f"import asyncio\nfrom shop import *\nasync def main():\n  {look}\nasyncio.run(main())", cwd=tmp_path
    )
    assert said == "hello Ada\n"


def test_the_store_by_itself_runs_as_printed(tmp_path: Path) -> None:
    assert run("-c", CODE[1], cwd=tmp_path).splitlines()[-1] == "{'text': 'Hello Ada'}"


def test_tests_that_the_readme_names_exist() -> None:
    text = README.read_text()
    sources = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in sources, name
    for name in re.findall(r"`(tests/\w+\.py)`", text):
        assert (README.parent / name).exists(), name
