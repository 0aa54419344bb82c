"""Uploads: files for jobs to come."""

from holdfast.api import uploads
from holdfast.api.routing import Call, Reply, Routes
from holdfast.api.shapes import UploadedFile, UploadForm, UploadView
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
    """Upload files, to be named in `uploads` of a job within a day."""
    received = await uploads.receive(call.request, call.tenant, call.service.settings, call.service.shared)
    files = [UploadedFile(path=name, size=size) for name, size in received.files.items()]
    return Reply(UploadView(upload=received.id, files=files), 201)
