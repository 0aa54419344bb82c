"""Requests made from the OpenAPI document, against real servers: the long form of `tests/service/test_openapi.py`.

For each store and role a `holdfast serve` of its own gets examples of every operation, half of them against the
document, then sequences of calls in which one answer gives the next call its ids. No worker runs beside it: the
commands that it submits are arbitrary, and none is executed. Wanted: no server error, and no answer that the document
does not describe except what `ARGUED` lists with its reason. `make fuzz`; about ten minutes per store and role.
"""

import argparse
import asyncio
import contextlib
import itertools
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky, Unsatisfiable
from requests.structures import CaseInsensitiveDict
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.generation.stateful.state_machine import StepOutput
from tests.support.cluster import cluster
from tests.support.service import Service, service_process_on

from bench.installation import new_database
from holdfast.model import Role
from holdfast.store.migrate import migrate
from holdfast.store.store import connect

STORES = ("sqlite", "postgres")
ROLES = tuple(str(role) for role in Role)
EXAMPLES, SEQUENCES, STEPS = 200, 500, 10
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "use_after_free", "ensure_resource_availability",
)  # fmt: skip
FUNCTION = {"runner": "function", "spec": {"name": "resize"}}
ACCEPTED: tuple[dict[str, Any], ...] = (
    {**FUNCTION, "inputs": {"width": 640}, "lane": "images"},
    {**FUNCTION, "hold": True, "labels": {"team": "blue"}},
    {"runner": "process", "spec": {"command": ["true"]}, "max_attempts": 3},
    {"tool": "render", "inputs": {"title": "May"}},
)
"""Jobs that are accepted: the document leaves `spec` to the runner, so what is made from it alone nearly never is."""
TOOL = """[tools.render]
description = "Renders a report."
runner = "process"
command = ["render", "{title}"]
inputs = {type = "object", required = ["title"], properties = {title = {type = "string"}}}
"""
OPEN_STREAM_SECONDS = 1.0
"""How long to read from a stream that has no end."""


@dataclass(frozen=True)
class Argued:
    """A deviation from the document that is meant to be: which check, at which operations, and why."""

    check: str
    operation: str
    why: str

    def covers(self, check: str, operation: str) -> bool:
        return check == self.check and re.fullmatch(self.operation, operation) is not None


ARGUED = (
    Argued(
        "JsonSchemaError",
        r"GET /v1/jobs/\{job_id\}/events/stream",
        "the schema describes the whole body, which is text; the check holds it against each event of the stream",
    ),
)


@dataclass
class Tally:
    """What one role met at one server."""

    store: str
    role: str
    calls: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    sequences: int = 0
    steps: int = 0
    open_streams: int = 0
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    argued: Counter[str] = field(default_factory=Counter)

    def fail(self, check: str, operation: str, text: str) -> None:
        if any(one.covers(check, operation) for one in ARGUED):
            self.argued[check] += 1
        else:
            self.failures.setdefault((operation, check), text)

    def __str__(self) -> str:
        least = min(self.calls.values(), default=0)
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.store} {self.role}: {len(self.calls)} operations, {sum(self.calls.values())} examples "
            f"(at least {least} each), {self.sequences} sequences with {self.steps} calls, "
            f"{self.open_streams} open streams; {statuses}; argued {sum(self.argued.values())}, "
            f"failed {len(self.failures)}"
        )


class Fuzzer:
    """Calls one server with one token, and tallies what the checks say instead of stopping at the first fault."""

    def __init__(self, service: Service, token: str, own: str, tally: Tally) -> None:
        self.tally = tally
        self._base = service.url
        self._own = own
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session = requests.Session()
        self._turns = itertools.count()
        document = requests.get(f"{service.url}/openapi.json", timeout=30).json()
        self.schema = schemathesis.openapi.from_dict(document)
        schemathesis.checks.load_all_checks()
        self._checks = [schemathesis.checks.CHECKS.get_one(name) for name in CHECKS]

    def call(self, case: Any, recorder: Any = None) -> Any:
        """Send a case and check its answer; return None if the answer has no end."""
        case.headers = CaseInsensitiveDict({**(case.headers or {}), **self._headers})
        if case.method == "DELETE" and (case.path_parameters or {}).get("token_id") == self._own:
            case.path_parameters["token_id"] = "another"  # Without its token the rest of the run would show nothing.
        endless = case.path.endswith("/stream") or str((case.query or {}).get("follow")).lower() in ("true", "1")
        try:
            response = case.call(
                base_url=self._base, session=self._session, timeout=OPEN_STREAM_SECONDS if endless else 60
            )
        except requests.Timeout:
            if not endless:
                self.tally.fail("answers in time", case.operation.label, f"{case.as_curl_command()}: no answer in 60 s")
            self.tally.open_streams += 1
            return None
        self.tally.statuses[response.status_code] += 1
        if recorder is not None:
            recorder.record_response(case_id=case.id, response=response)
        try:
            case.validate_response(response, checks=self._checks, recorder=recorder)
        except FailureGroup as group:
            for failure in group.exceptions:
                self._note(case, failure)
        return response

    def _note(self, case: Any, failure: Any) -> None:
        check = type(failure).__name__ if isinstance(failure, Failure) else "error"
        self.tally.fail(check, case.operation.label, f"{failure}\n{case.as_curl_command()}")

    def submitted(self, case: Any) -> None:
        """Make every second submission of a sequence one that is accepted, so that there are jobs to go on with."""
        if case.operation.label == "POST /v1/jobs" and next(self._turns) % 2:
            case.body = dict(ACCEPTED[next(self._turns) % len(ACCEPTED)])

    def examples(self, count: int, number: int) -> None:
        """Call each operation so many times: half of the examples are meant to be refused, where some can be."""
        for result in self.schema.get_all_operations():
            if not isinstance(result, Ok):
                raise AssertionError(result)
            operation = result.ok()
            modes = schemathesis.GenerationMode
            for mode, until in ((modes.NEGATIVE, count // 2), (modes.POSITIVE, count)):
                for more in range(count):
                    missing = until - self.tally.calls[operation.label]
                    if missing <= 0 or not self._run(operation, mode, missing, number + more):
                        break

    def _run(self, operation: Any, mode: Any, count: int, number: int) -> bool:
        @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @seed(number)
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            self.tally.calls[operation.label] += 1
            self.call(case)

        try:
            run()
        except Unsatisfiable:
            return False  # Nothing in it can be made wrong.
        return True

    def sequences(self, count: int, number: int) -> None:
        """Run so many sequences of calls that use what earlier ones answered."""
        fuzzer, tally = self, self.tally

        class Sequences(self.schema.as_state_machine()):  # type: ignore[misc]
            def setup(self) -> None:
                self.calls = 0

            def teardown(self) -> None:
                tally.sequences += self.calls > 1

            def step(self, input: Any) -> Any:
                self.before_call(input.case)
                self.calls += 1
                tally.steps += 1
                fuzzer.submitted(input.case)
                response = fuzzer.call(input.case, self.recorder)
                return None if response is None else StepOutput(response, input.case)

        for more in itertools.count():
            if tally.sequences >= count:
                break
            wanted = settings(
                max_examples=count - tally.sequences, stateful_step_count=STEPS, deadline=None, database=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            with contextlib.suppress(Flaky):  # The server remembers earlier sequences, so the same calls end elsewhere.
                seed(number + more)(Sequences).run(settings=wanted)


async def _migrated(url: str) -> None:
    database = await connect(url)
    await migrate(database)
    await database.close()


async def _token(service: Service, role: str) -> tuple[str, str]:
    """Make a token past the service; return its secret and its id."""
    secret = await service.token(Role(role), name=f"fuzz-{role}")
    async with service.client() as client:
        tokens = (await client.get("/v1/tokens")).json()["items"]
    (own,) = (token["id"] for token in tokens if token["name"] == f"fuzz-{role}")
    return secret, own


@contextlib.contextmanager
def _server(store: str, role: str, postgres: str | None) -> Iterator[Service]:
    """A server on an empty store, where submitters may submit commands too."""
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as folder:
        url = f"sqlite:///{folder}/holdfast.db"
        if postgres is not None:
            url = asyncio.run(new_database(postgres, f"fuzz_{role}"))
        asyncio.run(_migrated(url))
        tools = Path(folder) / "tools.toml"
        tools.write_text(TOOL)
        with service_process_on(url, Path(folder) / "data", allow_raw="true", tools=str(tools)) as service:
            asyncio.run(_fill(service))
            yield service


async def _fill(service: Service) -> None:
    """Submit jobs as an admin, and bring some of them to other states: those who may only read have what to read."""
    async with service.client() as client:
        for job in (*ACCEPTED, *ACCEPTED):
            answer = await client.post("/v1/jobs", json=job)
            answer.raise_for_status()
        for what, body in (("cancel", {"reason": "not needed"}), ("resume", {})):
            (await client.post(f"/v1/jobs/{answer.json()['id']}/{what}", json=body)).raise_for_status()
            answer = await client.post("/v1/jobs", json=ACCEPTED[0])
            (await client.post(f"/v1/jobs/{answer.json()['id']}/cancel", json={})).raise_for_status()


def fuzz(store: str, role: str, postgres: str | None, wanted: argparse.Namespace) -> Tally:
    tally = Tally(store, role)
    with _server(store, role, postgres) as service:
        secret, own = asyncio.run(_token(service, role))
        fuzzer = Fuzzer(service, secret, own, tally)
        fuzzer.examples(wanted.examples, wanted.seed)
        fuzzer.sequences(wanted.sequences, wanted.seed)
        answer = requests.get(f"{service.url}/v1/jobs", headers={"Authorization": f"Bearer {secret}"}, timeout=60)
        if answer.status_code != 200:
            tally.fail("token still works", "GET /v1/jobs", answer.text)
    return tally


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default=",".join(STORES), help="sqlite, postgres or both")
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="per operation")
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    good = True
    with contextlib.ExitStack() as stack:
        for store in wanted.stores.split(","):
            postgres = stack.enter_context(cluster()) if store == "postgres" else None
            for role in wanted.roles.split(","):
                began = time.monotonic()
                tally = fuzz(store, role, postgres, wanted)
                print(f"{tally}; {time.monotonic() - began:.0f} s", flush=True)
                for (operation, check), text in sorted(tally.failures.items()):
                    print(f"  {operation}: {check}\n    " + text.replace("\n", "\n    "), flush=True)
                good = good and not tally.failures
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
