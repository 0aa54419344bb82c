"""The OpenAPI document is complete, and no request generated from it is answered with a 500."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from requests.structures import CaseInsensitiveDict
from schemathesis.core.result import Ok

from holdfast.api import openapi
from holdfast.api.app import declared
from tests.support.service import FUNCTION, Service

EXAMPLES = 8
"""Per operation and kind of example, in the suite; `make fuzz` takes 200, and sequences of calls, for every role."""
ALLOWED = (400, 401, 403, 404, 409, 413, 422, 429)
FRAMING = ("content-length", "transfer-encoding")
"""Headers that say where a request ends: a wrong one is refused by the HTTP server, before the service is asked."""
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_document_has_every_route_with_types_and_the_error_shape() -> None:
    document = openapi.document(declared())
    assert {(method, path) for method, path, _ in operations(document)} == {
        (route.method, openapi.PARAMETER.sub(r"{\1}", route.path)) for route in declared()
    }
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)
    for method, path, operation in operations(document):
        assert operation["summary"], (method, path)
        for status, answer in operation["responses"].items():
            (schema, *_) = [content["schema"] for content in answer["content"].values()]
            assert schema in ({"type": "string"},) or {"$ref", "anyOf"} & set(schema), (method, path, status)
        if method in ("POST", "PUT", "PATCH"):
            assert "requestBody" in operation, (method, path)


async def test_document_says_what_the_service_does(service: Service) -> None:
    async with service.client() as client:
        document = (await client.get("/openapi.json")).json()
        headers = {one["name"]: one["schema"] for one in document["paths"]["/v1/jobs"]["post"]["parameters"]}
        for length, status in ((200, 200), (201, 422)):
            answer = await client.get("/v1/jobs", headers={"Holdfast-Tenant": "t" * length})
            assert answer.status_code == status
        assert headers["Holdfast-Tenant"]["maxLength"] == 200
        assert headers["Idempotency-Key"]["maxLength"] == 128
        for query in ("until=null", "since=NULL", "limit=null"):
            assert (await client.get(f"/v1/jobs?{query}")).status_code == 422, query
        assert (await client.get("/v1/jobs?kind=null&label=a:null")).status_code == 200


@pytest.mark.parametrize("preference", ["", "wait=0", "respond-async", "wait=soon", "x" * 300])
async def test_preference_that_is_not_understood_is_ignored_as_the_document_says(
    service: Service, preference: str
) -> None:
    """RFC 7240: a server refuses no preference. The document allows every text."""
    async with service.client() as client:
        made = await client.post("/v1/jobs", json=FUNCTION, headers={"Prefer": preference})
        assert made.status_code == 201, made.text
        operation = (await client.get("/openapi.json")).json()["paths"]["/v1/jobs"]["post"]
    (schema,) = [one["schema"] for one in operation["parameters"] if one["name"] == "Prefer"]
    assert schema == {"type": "string"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PATCH", "/v1/jobs", "GET, POST"),
        ("PUT", "/v1/jobs/x", "DELETE, GET"),
        ("DELETE", "/v1/lanes/x", "GET, PUT"),
        ("GET", "/v1/queues/x/pause", "POST"),
        ("PATCH", "/v1/queues/x/pause", "POST"),
        ("PUT", "/v1/lanes/x/resume", "POST"),
    ],
)
async def test_method_that_is_not_there_names_those_that_are(
    service: Service, method: str, path: str, allowed: str
) -> None:
    async with service.client() as client:
        answer = await client.request(method, path, json={} if method in ("PATCH", "PUT") else None)
        assert (answer.status_code, answer.headers.get("allow")) == (405, allowed)
        assert (await client.get("/v1/queues")).json()["items"] == []
        named = await client.patch("/v1/queues/x%2Fpause", json={"max_running": 2})
        assert (named.status_code, named.json()["queue"]) == (200, "x/pause")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=str)
def test_nothing_that_the_document_allows_or_forbids_ends_in_a_500(
    service_process: Service, mode: schemathesis.GenerationMode
) -> None:
    """Proves O8."""
    schemathesis.checks.load_all_checks()
    checks = [
        schemathesis.checks.CHECKS.get_one(name)
        for name in ("not_a_server_error", "status_code_conformance", "response_schema_conformance")
    ]
    headers = {"Authorization": f"Bearer {service_process.admin}"}
    document = httpx.get(f"{service_process.url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    called: Counter[str] = Counter()
    with requests.Session() as session:
        for result in schema.get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()

            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=SLOW)
            @seed(1)
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case: Any) -> None:
                given_headers = {
                    name: text for name, text in (case.headers or {}).items() if name.lower() not in FRAMING
                }
                case.headers = CaseInsensitiveDict({**given_headers, **headers})
                response = case.call(base_url=service_process.url, session=session, timeout=20)
                called[case.operation.label] += 1
                assert response.status_code in (405, *ALLOWED) or response.status_code < 300, response.text
                case.validate_response(response, checks=checks)

            try:
                call()
            except Unsatisfiable:
                continue  # Nothing in it can be made wrong.
    assert len(called) > 20, called
    assert "Traceback" not in service_process.log.read_text()
