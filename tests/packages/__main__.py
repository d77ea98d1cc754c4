"""``python -m tests.packages [NAME ...]``: runs the parts and prints the table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tests.packages.runs import run_package
from tests.packages.table import by_package, rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.packages", description=__doc__)
    parser.add_argument("names", nargs="*", help="packages, or parts of their names; none: all")
    parser.add_argument("--json", type=Path, help="append the results to this file, a line each")
    options = parser.parse_args()
    names = options.names
    print("| package | version | part | verdict | what is said |\n|---|---|---|---|---|")
    for package, parts in by_package().items():
        if names and not any(name in package for name in names):
            continue
        if results := run_package(parts):
            print(*rows(parts, results), sep="\n", flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(result)) + "\n" for result in results)


if __name__ == "__main__":
    main()
