"""Which shared folder belongs to this database: recorded once, at the first start, and then only by an operator."""

from holdfast.model import RecordedFolder
from holdfast.store.database import Database


class SharedFolderRecord:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> RecordedFolder | None:
        rows = await self._database.read("shared_folder")
        return RecordedFolder(id=rows[0]["id"], path=rows[0]["path"]) if rows else None

    async def write(self, recorded: RecordedFolder, *, instead_of: RecordedFolder | None) -> bool:
        """Record a folder; False if the record is no longer what it was."""
        known = None if instead_of is None else instead_of.id
        return bool(
            await self._database.rows("record_shared_folder", id=recorded.id, path=recorded.path, instead_of=known)
        )
