"""Containers, each with a supervisor as its PID 1, on any Docker engine: the one of this host or a remote one.

runner.py      starts, finds and sweeps attempts; knows whether the engine is there
container.py   one attempt: its output, its commands, its end
recipe.py      what a container is made of: name, labels, limits, the files in its volume
archive.py     files in and out of a container, as tar
engine.py      the engine's API; the only file that knows aiodocker
"""
