"""The description of the API, for programs and for people. Reading it needs no token, but passes the same guard."""

from collections.abc import Callable
from typing import Any

from starlette.responses import HTMLResponse, Response

from holdfast.api.docs_page import HEADERS, page
from holdfast.api.routing import Call, Reply, Routes


def docs_routes(document: Callable[[], dict[str, Any]]) -> Routes:
    """Return the two routes that show the document; they are not part of it."""
    routes = Routes()

    @routes.add("GET", "/openapi.json", role=None, answers={200: dict})
    async def read_openapi(call: Call) -> Reply:
        """Read the OpenAPI document."""
        return Reply(document())

    @routes.add("GET", "/docs", role=None, answers={200: str}, media="text/html")
    async def read_docs(call: Call) -> Response:
        """Read the OpenAPI document as a page."""
        return HTMLResponse(page(document()), headers=dict(HEADERS))

    return routes
