"""Runners start and find attempts. They know nothing of queues or SQL.

base.py            what every runner can do
runner_host.py     what a worker gives to the function that builds a runner
*_descriptor.py    what everything else knows about a runner: see registry.py
process.py         processes on this host
function.py        functions inside the worker
docker/            containers, with the same supervisor as their PID 1
attempt_folder.py  the files through which a worker and a supervisor communicate
wire.py            the format of the two files that the supervisor reads
frames.py          the log, read from any offset
supervisor/        the C program that runs a job's process, and its build
"""
