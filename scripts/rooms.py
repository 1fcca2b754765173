#!/usr/bin/env python3
"""Counts the rooms of the library and the arrows between them, by folder.

A folder's rooms are its modules (a header and its sources) and its subfolders; those of detail/, the private half of a folder, count as
the folder's own. An arrow is that one room includes another. A public header is a module of the folder that makes it: `world (public)` is what users see of it, and `world` what makes that.
An arrow runs back where rooms include each other in a circle: the fewest
arrows without which no circle is left.

  scripts/rooms.py              the working tree
  scripts/rooms.py --check      exit 1 where an arrow runs back
"""

import collections
import itertools
import subprocess
import sys
from pathlib import Path

import layers

ROOT = Path(__file__).resolve().parent.parent


def includes():
    """{(module, included module): the files that include so}; and every module."""
    owners = layers.owners()
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.split()
    sources = [name for name in listed if name.split("/")[0] in (*layers.folders(), "include") and (ROOT / name).exists() and
               name.endswith((".h", ".cpp", ".cu", ".cuh"))]
    modules = {module_of(name, owners) for name in sources} - {None}
    pairs = collections.defaultdict(list)
    for name in sources:
        for included in layers.includes_of((ROOT / name).read_text()):
            pair = module_of(name, owners), module_of(included, owners)
            if None not in pair and pair[0] != pair[1] and pair[1] in modules:
                pairs[pair].append(name)
    return pairs, modules


def module_of(name, owners):
    """detail/ counts as the folder itself, and another backend of a header as its module; None: of no folder."""
    public = name.removeprefix("include/")
    if public in owners:
        if not owners[public]:
            return None
        name = f"{owners[public]}/{Path(public).stem} (public)"
    return name.rsplit(".", 1)[0].replace("/detail/", "/")


def room_in(folder, module):
    prefix = folder + "/" if folder else ""
    return module[len(prefix):].split("/")[0] if module.startswith(prefix) else None


def circles(arrows):
    """The sets of rooms that reach each other."""
    rooms = {room for arrow in arrows for room in arrow}
    reach = {room: {room} for room in rooms}
    changed = True
    while changed:
        changed = False
        for begin, end in arrows:
            for room in rooms:
                if begin in reach[room] and not reach[end] <= reach[room]:
                    reach[room] |= reach[end]
                    changed = True
    found = []
    for room in sorted(rooms):
        circle = sorted(other for other in reach[room] if room in reach[other])
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def running_back(arrows):
    """The fewest arrows whose removal leaves no circle."""
    back = []
    for circle in circles(arrows):
        inside = sorted(arrow for arrow in arrows if arrow[0] in circle and arrow[1] in circle)
        for count in range(1, len(inside) + 1):
            cut = next((cut for cut in itertools.combinations(inside, count)
                        if not circles([arrow for arrow in inside if arrow not in cut])), None)
            if cut:
                back += cut
                break
    return back


def main():
    pairs, modules = includes()
    folders = {""} | {"/".join(module.split("/")[:depth]) for module in modules for depth in range(1, module.count("/") + 1)}
    folders = sorted(folder for folder in folders if folder.split("/")[-1] not in ("cuda", "cpu") and "gloo_declarations" not in folder)
    any_back = False
    print(f"{'folder':<22} {'rooms':>5} {'arrows':>6} {'back':>4}")
    for folder in folders:
        rooms = {room_in(folder, module) for module in modules} - {None}
        arrows = collections.defaultdict(list)
        for (begin, end), names in pairs.items():
            arrow = room_in(folder, begin), room_in(folder, end)
            if None not in arrow and arrow[0] != arrow[1]:
                arrows[arrow] += names
        back = running_back(list(arrows))
        print(f"{folder or '(the library)':<22} {len(rooms):>5} {len(arrows):>6} {len(back):>4}")
        for begin, end in back:
            any_back = True
            print(f"  {begin} includes {end}, which leads back to it: {', '.join(sorted(set(arrows[begin, end])))}")
    if "--check" in sys.argv and any_back:
        sys.exit("rooms: an arrow runs back: move what both need into a room below them")


main()
