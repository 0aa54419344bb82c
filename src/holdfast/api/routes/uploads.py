"""Uploads: files for later jobs."""

from holdfast.api import uploads
from holdfast.api.request_types import UploadedFile, UploadForm, UploadView
from holdfast.api.routing import Call, Reply, Routes
from holdfast.model import Role

routes = Routes()


@routes.add(
    "POST",
    "/v1/uploads",
    role=Role.SUBMITTER,
    answers={201: UploadView},
    shape=UploadForm,
    takes=uploads.MULTIPART,
)
async def upload(call: Call) -> Reply:
    """Upload files. A job can name them in `uploads` within a day."""
    service = call.service
    received = await uploads.receive(call.request, call.tenant, service.settings, service.artifacts)
    files = [UploadedFile(path=name, size=size) for name, size in received.files.items()]
    return Reply(UploadView(upload=received.id, files=files), 201)
