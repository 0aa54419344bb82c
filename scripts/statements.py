"""Print SQL as a database gets it, to be pasted into psql or sqlite3: `python -m scripts.statements postgres finish`.

In the files a statement includes fragments, and SQLite's text is made from Postgres' where both have the same shape.
"""

import argparse
import sys

from holdfast.store.sql_entries import texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dialect", choices=["postgres", "sqlite"])
    parser.add_argument("name", nargs="*", help="the statements to print; without one, all")
    given = parser.parse_args()
    found = texts(given.dialect)
    if unknown := sorted(set(given.name) - set(found)):
        parser.error(f"no statement {unknown[0]} on {given.dialect}")
    for name in given.name or found:
        sys.stdout.write(f"-- name: {name}\n{found[name]}\n")


if __name__ == "__main__":
    main()
