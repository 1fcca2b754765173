#!/usr/bin/env python3
"""Checks prose: that links and paths in pages lead somewhere, and that comments and help texts name their subject.

Prints each breach; exit 1 if any.
"""

import re
import sys

from tracked import ROOT, files

SNIPPET = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# A path as pages write it: `zero/plan/byte_plan` may stand for a header and its source.
PATH = re.compile(r"`([a-z_]+/[\w/]+(?:\.[a-z]+)?)`")
# A sentence without a subject, as the whole of a comment or of a help text begins it.
RIDDLE = re.compile(r"(?:Of|As(?! if| many)|In what|In which|By what|To what|With what) ")
COMMENT = re.compile(r"^\s*// ?(.*)$")
HELP = re.compile(r'(?:\.help\s*=|add_(?:option|flag|bytes)\w*\([^;]*?,)\s*"([A-Z][^"]*)"')


def anchor_of(heading):
    """The anchor that GitHub gives a heading.

    >>> anchor_of("What `p.grad()` is, at stage 3")
    'what-pgrad-is-at-stage-3'
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def riddles(text):
    """Comments and help texts that begin without a subject, each with its line.

    >>> riddles('int a;\\n// Of a page: its bytes.\\nint b;')
    [(2, 'Of a page: its bytes.')]
    >>> riddles('// What is kept\\n// Of course this line goes on.\\n')
    []
    >>> riddles('{.help = "In what gradients travel"}'), riddles('{.help = "Dtype of gradients"}')
    ([(1, 'In what gradients travel')], [])
    >>> riddles('app.add_option("--rank", rank,\\n  "Of the change")'), riddles('// As json has it.'), riddles('// As if it had died.')
    ([(2, 'Of the change')], [(1, 'As json has it.')], [])
    """
    found = []
    goes_on = False
    for number, line in enumerate(text.splitlines(), 1):
        comment = COMMENT.match(line)
        if comment and not goes_on and RIDDLE.match(comment[1]):
            found.append((number, comment[1]))
        goes_on = bool(comment and comment[1])
    # A call goes over several lines.
    for help_text in HELP.finditer(text):
        if RIDDLE.match(help_text[1]):
            found.append((text.count("\n", 0, help_text.start(1)) + 1, help_text[1]))
    return found


def leads_somewhere(page, path):
    """Whether a path in backticks is there, from the root or from the page's folder, with whatever suffix."""
    top = path.split("/")[0]
    if top == "build" or not (ROOT / top).is_dir():
        return True  # no path of ours, such as `run/step-1000`
    return any(start.exists() or any(start.parent.glob(start.name + "*")) for start in (ROOT / path, page.parent / path))


def breaches():
    for name in files(".md"):
        page = ROOT / name
        prose = SNIPPET.sub("", page.read_text())
        for link in LINK.findall(prose):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if link.startswith(("http:", "https:", "mailto:")):
                continue
            if not target.exists():
                yield f"{name}: links to {link}, which is not there"
            elif anchor and target.suffix == ".md" and anchor not in map(anchor_of, HEADING.findall(target.read_text())):
                yield f"{name}: links to {link}, but that page has no such heading"
        # The changelog names files that were moved.
        for path in PATH.findall(prose) if name != "CHANGELOG.md" else ():
            if not leads_somewhere(page, path):
                yield f"{name}: names `{path}`, which is not there"
    for name in files(".h", ".cpp", ".cu", ".cuh"):
        for number, words in riddles((ROOT / name).read_text()):
            yield f'{name}:{number}: begins without a subject: "{words}"; name it with a noun'


def main():
    found = list(breaches())
    print("\n".join(found) or "docs: links, paths and comments are in order")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
