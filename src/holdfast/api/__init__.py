"""The service: HTTP over the store. It knows no SQL and no worker; it reads files that runners stored."""

from importlib.metadata import version

VERSION = version("holdfast")
