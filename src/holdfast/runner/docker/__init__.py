"""Containers, each with a supervisor as its PID 1, on any Docker engine: the one of this host or a remote one.

descriptor.py         what everything else knows about this runner
build.py              builds it from a worker's settings
runner.py             starts, finds and sweeps attempts
engine_watch.py       whether the engine is reachable, and still the same one; its clock
engine_events.py      which containers have ended, by the engine's events
container.py          one attempt: its state, its commands, its end
container_log.py      its output: from the engine's log, or from the supervisor's where that has gaps
container_outputs.py  what it left in its work folder
container_removal.py  its removal, in the background
container_config.py   the configuration of a container: name, labels, limits, the files in its volume
hosts_file.py         the /etc/hosts of containers without a network
image_users.py        the numeric user of a container, looked up in its image
docker_workspace.py   the workspaces of pipelines, which are mounted into their containers
job_containers.py     removes the containers of deleted jobs
start_slots.py        limits how many containers start at once
archive.py            files in and out of a container, as tar
engine.py             the engine's API; the only file that knows aiodocker
"""
