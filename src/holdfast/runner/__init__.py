"""What runs jobs. A runner knows nothing of queues or SQL.

folder.py      the attempt folder: spec in, `started`, log and `exit` out, commands in between
spec.py        what is to run, as the supervisor reads it
frames.py      the log, read from any offset
docker/        containers, with the same supervisor as their PID 1
leftovers.py   what a killed supervisor left behind
supervisor/    the C program that runs a job's process, and its build
"""
