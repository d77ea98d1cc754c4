"""``python -m tests.packages [NAME ...]``: runs the parts and prints the table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tests.packages.runs import run_package
from tests.packages.table import by_package, row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.packages", description=__doc__)
    parser.add_argument("names", nargs="*", help="packages, or parts of their names; none: all")
    parser.add_argument("--json", type=Path, help="also append the results to this file")
    options = parser.parse_args()
    names = options.names
    print("| package | version | part | verdict | what is said |\n|---|---|---|---|---|")
    for package, parts in by_package().items():
        if names and not any(name in package for name in names):
            continue
        for result in run_package(parts):
            part = next(part for part in parts if part.id == result.id)
            print(row(part, result), flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
