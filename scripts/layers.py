#!/usr/bin/env python3
"""The library's folders, from the lowest on, and who makes each public header. Other scripts ask here.

The folders are those of CMakeLists.txt, in its order; the headers' owners are in the tables of include/zeropage/README.md.
"""

import re
from pathlib import Path

from tracked import ROOT


PUBLIC = "include/zeropage/"
INCLUDE = re.compile(r'^\s*#include "([\w/]+\.(?:h|cuh))"', re.MULTILINE)


def folders():
    text = (ROOT / "CMakeLists.txt").read_text()
    listed = re.search(r"foreach\(folder IN ITEMS ([^)]*)\)", text)[1].split()
    # Libraries of their own: one above zeropage, and one beside it.
    return (*listed, "data", "text")


def owners():
    """Public header, without include/: the folder that makes it; "" for the umbrella and the names."""
    table = re.findall(r"^\| `([\w/*]+)\.h`\*? \| (?:`(\w+)/`|all) \|", (ROOT / PUBLIC / "README.md").read_text(), re.MULTILINE)
    found = {}
    for name, owner in table:
        for path in (ROOT / PUBLIC).glob(name + ".h"):
            found[str(path.relative_to(ROOT / "include"))] = owner
    return found


def outside_the_umbrella():
    """Public headers, without include/, that the tables mark with *."""
    names = re.findall(r"^\| `([\w/*]+)\.h`\* \|", (ROOT / PUBLIC / "README.md").read_text(), re.MULTILINE)
    return {f"zeropage/{name}.h" for name in names}


def public_headers():
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / PUBLIC).rglob("*.h"))


def includes_of(text):
    return INCLUDE.findall(text)


def path_of(included):
    """The file that an include in quotes means, from the project's folder on."""
    return next((name for name in (included, "include/" + included, "examples/" + included) if (ROOT / name).exists()), included)


if __name__ == "__main__":
    print(*folders())
