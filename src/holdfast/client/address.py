"""Where the server is and with which token: the settings that a client takes from its environment."""

import os
from pathlib import Path

import httpx

from holdfast.errors import ConfigError

MOST_PORT = 65_535


def find_token(data_dir: Path | None = None) -> str | None:
    """Return the token of `HOLDFAST_TOKEN`, else the one that the first start wrote to the data folder."""
    if token := os.environ.get("HOLDFAST_TOKEN"):
        return token
    folder = data_dir or Path(os.environ.get("HOLDFAST_DATA_DIR") or "holdfast-data")
    try:
        return (folder / "admin.token").read_text().strip()
    except OSError:
        return None


def checked_url(text: str) -> str:
    """Return the URL of a server, or raise an error that says how to write one."""
    try:
        url = httpx.URL(text.rstrip("/"))
        if url.scheme in ("http", "https") and url.host and (url.port or 0) <= MOST_PORT:
            return str(url)
    except httpx.InvalidURL:
        pass
    raise ConfigError([f"HOLDFAST_URL is {text!r}: use http://host:port"])
