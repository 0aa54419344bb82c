"""Which shared folder belongs to this database: recorded once, at the first start, and then only by an operator."""

from holdfast.model import RecordedFolder
from holdfast.store.audit import By, record
from holdfast.store.database import Database, Tx


class SharedFolderRecord:
    """`by` is the person who adopts a folder; the first start of a server or worker records one by itself."""

    def __init__(self, database: Database, *, by: By = None) -> None:
        self._database = database
        self._by = by

    async def read(self) -> RecordedFolder | None:
        rows = await self._database.read("shared_folder")
        return RecordedFolder(id=rows[0]["id"], path=rows[0]["path"]) if rows else None

    async def write(self, recorded: RecordedFolder, *, instead_of: RecordedFolder | None) -> bool:
        """Record a folder; False if the record is no longer what it was."""
        replaced_id = None if instead_of is None else instead_of.id

        async def change(tx: Tx) -> bool:
            rows = await tx.rows("record_shared_folder", id=recorded.id, path=recorded.path, instead_of=replaced_id)
            if rows and self._by is not None:
                before = None if instead_of is None else {"id": instead_of.id, "path": instead_of.path}
                after = {"id": recorded.id, "path": recorded.path}
                await record(tx, self._by, "shared_folder.adopt", recorded.path, before=before, after=after)
            return bool(rows)

        return await self._database.transact(change)
