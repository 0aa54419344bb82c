"""A runner for holdfast: a job brings the text of a script, and the name of what reads it.

descriptor.py  what a server, a client and a worker know about it
runner.py      how a worker runs it
"""
