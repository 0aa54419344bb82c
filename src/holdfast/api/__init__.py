"""The service: HTTP over the store. It knows no SQL, no worker and no runner."""

from importlib.metadata import version

VERSION = version("holdfast")
