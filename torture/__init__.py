"""Torture: real processes under random faults, a recorded history of all that happened, and a checker over it."""
