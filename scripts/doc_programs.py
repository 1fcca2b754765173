#!/usr/bin/env python3
"""Writes the C++ of README.md and docs/ into a folder, so that scripts/check_consumer.sh can compile it as users would type it.

A block that begins with ```LANGUAGE FILE is a whole file: it becomes FOLDER/<page>/FILE. Every other block of ```cpp is a snippet: it
becomes a function in FOLDER/snippets/<page>.cpp, within what scripts/doc_snippets.h declares. A compiler's error names the page's line.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\S*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHER_NAMES = ("c++", "C++", "cc", "cxx")
MAIN = "int main() try {"
COUNTS = re.compile(r"\b(?:int64_t|int|auto) (?:step|samples)\b")
INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)


def write(path, text):
    """Leaves a file of that text alone, so that nothing is compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_page(page, folder):
    """Returns how many whole files and how many snippets the page has."""
    text = page.read_text()
    name = page.relative_to(ROOT)
    stem = page.stem.lower()
    files, functions = 0, []
    for block in BLOCK.finditer(text):
        language, file, code = block.groups()
        if language in OTHER_NAMES:
            line = text.count("\n", 0, block.start()) + 1
            sys.exit(f"{name}:{line}: a block of {language}, which nothing compiles; write cpp")
        if file:
            write(folder / stem / file, code)
            files += 1
        elif language == "cpp":
            line = text.count("\n", 0, block.start()) + 2
            within = INCLUDE.sub("", code)  # the header above has them, and a function may not
            if MAIN in within:
                within = within.replace(MAIN, "const auto program = [&]() -> int { try {") + "return 0; };\nprogram();\n"
            # One that counts steps itself is given none, which would hide that it uses its own where there is none.
            head = "ZEROPAGE_SNIPPET_THAT_COUNTS" if COUNTS.search(code) else "ZEROPAGE_SNIPPET"
            functions.append(f'{head}({stem}_{line}) {{{{\n#line {line} "{name}"\n{within}}}}}\n')
    if functions:
        write(folder / "snippets" / f"{stem}.cpp", '#include "doc_snippets.h"\n\n' + "\n".join(functions))
    return files, len(functions)


def main():
    folder = Path(sys.argv[1])
    counts = [write_page(page, folder) for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    print(f"docs: {sum(files for files, _ in counts)} files of programs, {sum(snippets for _, snippets in counts)} snippets")


main()
