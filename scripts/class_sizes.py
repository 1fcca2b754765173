#!/usr/bin/env python3
"""Counts the methods and the data members of the library's classes.

A class that does more than one thing shows as one with much state, so members have a limit. Methods are for who reads the list: a class of
one state may offer many. Overloads count each; constructors, destructors, operators and what
is deleted do not. A derived class counts what it declares itself. Two things do not count:

* collectives: an interface of communicators has all of them, and so has each class that implements it;
* the members of a struct without a private part, such as options and statistics: it hides no state, and whoever reads it sees a table.

  scripts/class_sizes.py              the largest classes
  scripts/class_sizes.py --check      exit 1 where a class has more than 12 members and EXEMPT does not say why, and where
                                      EXEMPT names a class that needs no exemption
"""

import re
import sys

import layers
from tracked import ROOT, files

MOST_MEMBERS = 12
COLLECTIVE = re.compile(r"(start_)?(all_gather|all_reduce|all_to_all|barrier|broadcast|gather|recv|reduce|reduce_scatter|scatter|send)$")
# Class, and why it may be larger.
EXEMPT = {}

TOKEN = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'|^\s*\#[^\n]*""", re.S | re.M)
HEAD = re.compile(r"\b(class|struct)\s+(?:\[\[[^\]]*\]\]\s*)?([A-Za-z_]\w*)(?:\s+final)?\s*(?::[^:;{}][^;{}]*)?\{")


def balanced(text, start, opening="{", closing="}"):
    """The index behind the bracket that closes the one at start."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == opening) - (text[index] == closing)
        if depth == 0:
            return index + 1
    raise ValueError("brackets do not match")


def statements(body):
    """What the class declares, each without its inner braces."""
    text, index, found = "", 0, []
    while index < len(body):
        char = body[index]
        if char == "{":
            end = balanced(body, index)
            rest = body[end:].lstrip()
            # `int x{1};` and `enum class E {...};` go on to their semicolon, `Options options = {}` to the end of the arguments that it is
            # one of; a function's body ends the declaration.
            if text.count("(") > text.count(")"):
                text += "{}"
            elif rest.startswith((";", ",")) or re.search(r"[\w>\]]\s*$", text) and not re.search(r"\)\s*(const|noexcept|override|final|\s)*$", text):
                text += "{}"
            else:
                found.append(text)
                text = ""
                if rest.startswith(";"):
                    end = body.index(";", end) + 1
            index = end
            continue
        if char == ";":
            found.append(text)
            text = ""
        else:
            text += char
        index += 1
    return found


def count(name, body):
    methods = members = 0
    for statement in statements(body):
        text = re.sub(r"\b(public|protected|private)\s*:", " ", statement).strip()
        text = re.sub(r"^template\s*<.*?>\s*(requires\b[^;]*?\)\s*)?", "", text, flags=re.S).strip()
        if not text or re.match(r"(using|friend|class|struct|enum|static_assert|typedef|union)\b", text):
            continue
        if re.search(r"~|\boperator\b|=\s*(delete|default)\s*$", text):
            continue
        plain = re.sub(r"<[^<>()]*>", "", re.sub(r"<[^<>()]*>", "", text))
        without_default = plain.split("=")[0]
        # A member of function type has its parentheses inside angle brackets.
        shallow, depth = "", 0
        for char in without_default:
            depth += (char == "<") - (char == ">")
            if depth <= 0:
                shallow += char
        if "(" in shallow:
            title = re.search(r"(\w*)\s*\(", shallow).group(1)
            methods += title != name and not COLLECTIVE.match(title)
        elif not re.match(r"static\s+constexpr|static\s+const\b|constexpr", text):
            members += 1
    return methods, members


def is_plain(keyword, body):
    return keyword == "struct" and not any(re.search(r"\b(private|protected)\s*:", statement) for statement in statements(body))


def classes():
    for name in files(".h", ".cpp"):
        if name.split("/")[0] not in (*layers.folders(), "include"):
            continue
        text = TOKEN.sub(" ", (ROOT / name).read_text())
        for match in HEAD.finditer(text):
            end = balanced(text, match.end() - 1)
            body = text[match.end():end - 1]
            methods, members = count(match.group(2), body)
            yield name, match.group(2), methods, 0 if is_plain(match.group(1), body) else members


def main():
    found = sorted(classes(), key=lambda entry: (-entry[3], -entry[2]))
    if sys.argv[1:] != ["--check"]:
        for name, title, methods, members in found[:40]:
            print(f"{methods:4} methods {members:4} members  {title}  {name}")
        return
    large = [entry for entry in found if entry[3] > MOST_MEMBERS]
    wrong = [f"{name}: class {title} has {members} members; expected at most {MOST_MEMBERS}: "
             "divide it by noun, state included, or say in EXEMPT of scripts/class_sizes.py why not"
             for name, title, methods, members in large if title not in EXEMPT]
    wrong += [f"scripts/class_sizes.py: EXEMPT names {title}, but no class of that name is past the limits; remove the line"
              for title in sorted(EXEMPT.keys() - {entry[1] for entry in large})]
    if wrong:
        print("\n".join(wrong))
        sys.exit(1)
    exempt = f" but {len(EXEMPT)} with a reason" if EXEMPT else ""
    print(f"classes: {len(found)}, none past {MOST_MEMBERS} members{exempt}")


if __name__ == "__main__":
    main()
