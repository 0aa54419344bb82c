"""Finds the numeric user of a container: names are looked up in the image's own list of users, and root is refused."""

import contextlib
import tarfile

from holdfast.runner.base import CannotStart
from holdfast.runner.docker.archive import only_file
from holdfast.runner.docker.container_config import root_group, to_user
from holdfast.runner.docker.engine import ContainerInfo, Engine, NoSuchObject
from holdfast.runner.users import User, refuse_root

MOST_USERS = 1024 * 1024
"""Maximum bytes of an image's /etc/passwd or /etc/group."""


class ImageUsers:
    """Looks up users in the images of one engine."""

    def __init__(self, engine: Engine, *, allow_root: bool) -> None:
        self._engine = engine
        self._allow_root = allow_root

    async def user_of(self, seen: ContainerInfo | None) -> User | None:
        """Return the numeric user of a container."""
        if seen is None:
            return None
        return to_user(seen.user) or to_user(seen.user, await self._passwd(seen.id))

    async def find(self, created: str, name: str, image: str) -> User:
        user = to_user(name) or to_user(name, await self._passwd(created))
        if user is None:
            raise CannotStart("command_missing", f"there is no user {name} in image {image}")
        await self._refuse_root(created, name, user, image)
        return user

    async def _refuse_root(self, created: str, name: str, user: User, image: str) -> None:
        """Refuse root, and root's group: a user given by name also gets the groups that the image lists."""
        if self._allow_root:
            return
        refuse_root(user, f"user {name} of image {image}", allow_root=False)
        if to_user(name) is None and name in root_group(await self._file(created, "/etc/group")):
            message = f"user {name} of image {image} is in root's group; see HOLDFAST_ALLOW_ROOT_JOBS of the worker"
            raise CannotStart("root_refused", message)

    async def _passwd(self, container: str) -> bytes:
        return await self._file(container, "/etc/passwd")

    async def _file(self, container: str, path: str) -> bytes:
        """Read a small regular file of an image; empty if it does not exist."""
        found = b""
        try:
            async with contextlib.aclosing(self._engine.get(container, path)) as tar:
                async for chunk in only_file(tar):
                    found += chunk
                    if len(found) > MOST_USERS:
                        raise CannotStart("start_failed", f"{path} of the image is too large: give the user as a uid")
        except NoSuchObject:
            return b""
        except tarfile.HeaderError as error:
            message = f"{path} of the image is not a regular file: give the user as a uid"
            raise CannotStart("start_failed", message) from error
        return found
