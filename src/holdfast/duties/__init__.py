"""Periodic work. One file each, with a `run_once` that bounds its work and is safe with two leaders."""
