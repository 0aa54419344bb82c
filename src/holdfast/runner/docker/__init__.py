"""Containers, each with a supervisor as its PID 1, on any Docker engine: the one of this host or a remote one.

descriptor.py        what everything else knows about this runner
build.py             builds it from a worker's settings
runner.py            starts, finds and sweeps attempts; knows whether the engine is reachable
container.py         one attempt: its output, its commands, its end
container_config.py  the configuration of a container: name, labels, limits, the files in its volume
docker_workspace.py  the workspaces of pipelines, which are mounted into their containers
start_slots.py       limits how many containers start at once
archive.py           files in and out of a container, as tar
engine.py            the engine's API; the only file that knows aiodocker
"""
