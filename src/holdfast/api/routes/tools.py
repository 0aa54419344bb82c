"""Tools: the job templates that callers may use by name."""

from holdfast.api.request_types import ToolList
from holdfast.api.routing import Call, Reply, Routes
from holdfast.model import Role
from holdfast.response_types import ToolView

routes = Routes()


@routes.add("GET", "/v1/tools", role=Role.VIEWER, answers={200: ToolList})
async def list_tools(call: Call) -> Reply:
    """List tools with the JSON Schema of their inputs."""
    views = [
        ToolView(name=name, description=tool.description, runner=tool.runner, inputs=tool.inputs)
        for name, tool in call.service.tools.items()
    ]
    return Reply(ToolList(items=views))
