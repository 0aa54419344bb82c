"""The Python API for applications."""
