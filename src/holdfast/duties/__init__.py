"""Duties: periodic work, one file each, with a `run_once` whose work is bounded and safe with two leaders."""
