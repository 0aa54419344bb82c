"""The package's build hook: builds the supervisor in the source tree, where wheels and editable installs find it."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "src/holdfast/runner/supervisor/build.py"


class SupervisorHook(BuildHookInterface):  # type: ignore[type-arg]
    def dependencies(self) -> list[str]:
        """Ask for zig only where no compiler of the machine can do it."""
        return [] if self._builder().system_compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = self._builder()
        target = builder.build()
        machine = builder.machine()
        build_data["artifacts"].append(str(target.relative_to(self.root)))
        build_data["pure_python"] = False
        # The program is static: it needs no C library of the machine, so it runs on all of them.
        everywhere = f"manylinux2014_{machine}.musllinux_1_1_{machine}"
        build_data["tag"] = f"py3-none-{everywhere if machine in ('x86_64', 'aarch64') else f'linux_{machine}'}"

    def _builder(self) -> ModuleType:
        """Load the build module by its path; the package is not installed yet."""
        spec = importlib.util.spec_from_file_location("holdfast_supervisor_build", Path(self.root, BUILD))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
