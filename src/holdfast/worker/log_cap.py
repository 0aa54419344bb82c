"""The cap of a job's log, for commands, pipelines and functions alike. Pure, no I/O."""


class LogCap:
    """Counts bytes against a cap. What does not fit is dropped, and so is all that follows; one note says so."""

    def __init__(self, most: int, what: str = "the log is") -> None:
        self._most = most
        self._what = what
        self._noted = False
        self.kept = 0
        """Bytes that were kept so far: of the log, by all attempts of the job."""
        self.cut = False

    def fits(self, size: int) -> bool:
        """Return whether `size` more bytes are kept, and count them."""
        self.cut = self.cut or self.kept + size > self._most
        if not self.cut:
            self.kept += size
        return not self.cut

    def note(self) -> str | None:
        """Return what to write where the cap was reached, the first time only."""
        if self._noted:
            return None
        self._noted = True
        return f"{self._what} over {self._most} bytes; what follows is not kept"
