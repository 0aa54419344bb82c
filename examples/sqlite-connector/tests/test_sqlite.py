"""The connector `sqlite` guarantees what every connector does; and what is its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.pipeline.connectors import WorkspaceNotConsistent, connector_of
from holdfast.testing import ConnectorSuite

FIRST = "CREATE TABLE numbers (n INTEGER CHECK (n > 0)); INSERT INTO numbers VALUES (1);"
NEXT = "INSERT INTO numbers SELECT CASE WHEN count(*) = {n} - 1 THEN {n} ELSE -1 END FROM numbers;"


class TestSqlite(ConnectorSuite):
    name = "sqlite"

    def task(self, n: int, sources: Path) -> Mapping[str, Any]:
        (sources / f"{n}.sql").write_text(FIRST if n == 1 else NEXT.format(n=n))
        return {"sql": f"{n}.sql"}

    def test_an_open_transaction_is_not_quiet(self, tmp_path: Path) -> None:
        connector = connector_of(self.name)
        connector.check_quiet(tmp_path)
        (tmp_path / "data.db-journal").touch()
        with pytest.raises(WorkspaceNotConsistent):
            connector.check_quiet(tmp_path)
