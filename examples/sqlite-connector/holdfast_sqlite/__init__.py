"""A connector for holdfast: the workspace of a pipeline is an SQLite database, and tasks are SQL files.

descriptor.py  what a server, a client and a worker know about it
connector.py   how tasks run, and when the workspace can be copied
"""
