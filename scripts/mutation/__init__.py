"""Mutation testing of the store and the worker: `make mutation`, or `python -m scripts.mutation`.

A seed draws small faults (mutants) from the Python and SQL files; each runs in a private copy of the tree against the
tests that execute the changed code. A mutant that no test notices has survived: it is a hole in the tests, or
`survivors.toml` says why it is accepted.

General layout: `python_code` and `sql_code` list the possible mutants of one file, `sample` draws some of them;
`coverage_map` finds out which tests execute which block of Python and which SQL statement (`probe` runs inside the
measured tree, `plugin` inside pytest); `tree` makes the private copies and runs commands in them (`bounded` ends what
they leave); `judge` runs one mutant; `survivors` reads the accepted ones.

Written for this project because mutmut, cosmic-ray and mutatest mutate Python only. Half of what fences a job is SQL.
"""
