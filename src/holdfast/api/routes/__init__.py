"""One file per resource: its endpoints, each declared with the role that it needs."""
