#!/usr/bin/env python3
"""Checks scripts/check_gpu.sh where there is no GPU: that each part of its list is a function and each function a part, that each program
that a part runs is one that scripts/carry.sh packs and each of those is run, and that the flags of the programs that are built are flags
of theirs.

    check_gpu_parts.py [BUILD]    a build folder; without it, or without a program in it, flags are not compared

Exit status: 0 all is so; 1 not, and what.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# These take flags of GoogleTest, or of CMake, or pairs of keys that their table has.
WITHOUT_FLAGS = re.compile(r"^tests/")


def output_of(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def listed_parts():
    lines = output_of("scripts/check_gpu.sh", "--list").splitlines()
    return [line.split()[0] for line in lines if not line.startswith("without PART")]


def dry_run(parts, programs):
    """What the parts would start: (name of the command, program, words); and which programs are not among these."""
    with tempfile.TemporaryDirectory(prefix="check-gpu-parts-") as name:
        built = Path(name) / "built"
        for program in programs:
            path = built / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
        subprocess.run(["scripts/check_gpu.sh", "--dry-run", "--built", built, "--out", name, *parts], cwd=ROOT, check=False,
                       capture_output=True, text=True)
        lines = [line.split("\t") for line in (Path(name) / "figures.tsv").read_text().splitlines()]
        started, wrong = [], []
        for command, value, *_ in lines:
            if not value.startswith(("at most", "is not there")):
                continue
            words = value.replace(f"{built}/", "BUILT/").split(": ", 1)[1].split()
            of_programs = [word for word in words if re.fullmatch(r"BUILT/\w+/\w+", word)]
            for program in (word.removeprefix("BUILT/") for word in of_programs):
                started.append((command, program, words))
                if program not in programs:
                    wrong.append(f'"{command}" runs {program}, which scripts/carry.sh does not pack')
        return started, wrong


def wrong_flags(started, build):
    """Of programs that are built, what is no flag in their --help."""
    wrong, known = [], {}
    for command, program, words in started:
        path = Path(build) / program
        if WITHOUT_FLAGS.search(program) or not path.exists():
            continue
        if program not in known:
            known[program] = set(re.findall(r"--[a-z][a-z0-9-]*", output_of(path.resolve(), "--help")))
        own = words[words.index("BUILT/" + program) + 1:]
        wrong += [f'"{command}": {program} has no flag {word}' for word in own
                  if word.startswith("--") and word.split("=")[0] not in known[program]]
    return wrong, sorted(known)


def main():
    parts = listed_parts()
    functions = re.findall(r"^part_(\w+)\(\)", (ROOT / "scripts/gpu_parts.sh").read_text(), re.MULTILINE)
    wrong = [f"--list has {part}, and scripts/gpu_parts.sh has no part_{part}()" for part in parts if part not in functions]
    wrong += [f"scripts/gpu_parts.sh has part_{part}(), which --list does not name" for part in functions if part not in parts]
    programs = output_of("scripts/carry.sh", "--programs").split()
    started, not_packed = dry_run([part for part in parts if part in functions], programs)
    wrong += not_packed
    run = {program for _, program, _ in started}
    wrong += [f"scripts/carry.sh packs {program}, which no part runs" for program in programs if program not in run]
    compared = []
    if len(sys.argv) > 1:
        flags, compared = wrong_flags(started, sys.argv[1])
        wrong += flags
    for line in wrong:
        print(f"check_gpu_parts: {line}", file=sys.stderr)
    if not wrong:
        print(f"check_gpu: {len(parts)} parts, {len(started)} commands of {len(run)} programs; flags compared of: {' '.join(compared) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
