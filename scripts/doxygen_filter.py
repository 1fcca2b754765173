#!/usr/bin/env python3
"""Prints a header with its plain // comments as Doxygen's, for docs/Doxyfile (INPUT_FILTER).

The comment at the top describes the file and, where the file is named after a class, that class too. A comment directly above a
declaration describes it, and so does one behind it. Comments in function bodies stay what they are.
"""

import re
import sys

COMMENT = re.compile(r"^\s*//( ?.*)$")
LABEL = re.compile(r"^(Lifetime|Threads?|Throws|Collective|Costs?|Units|Memory|Errors|REQUIRES)([:.])\s*")
SCOPE = re.compile(r"^(inline )?(namespace|class|struct|union|enum)\b")
NOT_DECLARED = re.compile(r"^(#(?!define)|\}|namespace\b|(public|private|protected):|using (enum )?[\w:\"]+;|static_assert|extern \"C\")")
QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|(?<![\w])\'(?:\\.|[^\'\\])+\'')


def split(line):
    """The code of a line and its comment; None where it has none."""
    plain = QUOTED.sub(lambda match: "_" * len(match.group()), line)
    at = plain.find("//")
    return (plain, None) if at < 0 else (plain[:at], line[at + 2:])


class Scopes:
    """Which braces are open: of namespaces and classes, where declarations are, or of anything else."""

    def __init__(self):
        self.open, self.parentheses, self.statement = [], 0, ""

    def declares(self):
        return all(self.open) and self.parentheses == 0

    def read(self, code):
        if code.lstrip().startswith("#"):
            return
        for letter in code + " ":
            if letter == "{":
                words = re.sub(r"\[\[.*?\]\]|alignas\(\w+\)|^template\s*<.*>(?=\s*(class|struct))|\b(public|private|protected):", "",
                               self.statement.strip())
                self.open.append(bool(SCOPE.match(" ".join(words.split()))) and self.parentheses == 0)
                self.statement = ""
            elif letter == "}":
                self.open.pop()
                self.statement = ""
            elif letter == ";" and self.parentheses == 0:
                self.statement = ""
            else:
                self.parentheses += (letter == "(") - (letter == ")")
                self.statement += letter


def escaped(text):
    """Words that Doxygen would take for commands, tags or links, as words; what stands between backticks is left alone."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([\\@<>#])", r"\\\1", parts[index])
    return "`".join(parts)


def described(lines):
    """The lines of a comment, without their slashes, as Markdown of Doxygen: what is indented is code, or a list."""
    out, code, in_list, in_label = [], False, False, False
    for line in lines:
        text = line[1:] if line.startswith(" ") else line
        indented = text.startswith("  ")
        if text.lstrip().startswith("- ") and not code:
            in_list = True
        elif text and not indented:
            in_list = False
        is_code = indented and not in_list
        if is_code and not code:
            out.append("@code{.cpp}")
        if code and not is_code and text:
            out.append("@endcode")
            code = False
        code = code or is_code
        if code:
            out.append(text[2:])
            continue
        label = LABEL.match(text)
        if label:
            out.append(f"@par {label.group(1)}")
            text = text[label.end():]
            text = text[:1].upper() + text[1:]
        elif in_label and text[:1].isupper() and out[-1].endswith("."):
            out.append("")
        in_label = bool(label) or (in_label and bool(text))
        out.append(escaped(text))
    if code:
        out.append("@endcode")
    return out


def class_of(path):
    """include/zeropage/accumulator.h: LossScaler."""
    return "".join(word.capitalize() for word in path.rsplit("/", 1)[-1].removesuffix(".h").split("_"))


def filtered(path, lines):
    """The lines of the header with Doxygen's comments."""
    scopes, out, at = Scopes(), [], 0
    head = []
    while at < len(lines) and COMMENT.match(lines[at]):
        head.append(COMMENT.match(lines[at]).group(1))
        at += 1
    head = described(head)
    out += ["/// @file"] + ["/// " + line for line in head]
    main_class = re.compile(rf"^(class|struct) {class_of(path)}\b[^;]*$")

    def declares_main(at):
        return main_class.match(lines[at + 1] if lines[at].startswith("template") and at + 1 < len(lines) else lines[at])

    column = None  # of the comment behind a declaration, which the lines below may continue
    while at < len(lines):
        line = lines[at]
        code, comment = split(line)
        if comment is not None and not code.strip():
            if column is not None and line.index("//") == column:
                out.append(line[:column] + "///< " + " ".join(described([comment])))
                at += 1
                continue
            block = []
            while at < len(lines) and COMMENT.match(lines[at]):
                block.append(lines[at])
                at += 1
            below = lines[at].strip() if at < len(lines) else ""
            if scopes.declares() and below and not NOT_DECLARED.match(below):
                indent = block[0][:block[0].index("//")]
                words = described([COMMENT.match(each).group(1) for each in block])
                out += [f"{indent}/// {text}" for text in (head + ["@par"] if declares_main(at) else []) + words]
            else:
                out += block
        elif declares_main(at) and not (at > 0 and COMMENT.match(lines[at - 1])) and not lines[at - 1].startswith("template"):
            out += ["/// " + text for text in head]
        column = None
        if at == len(lines):
            break
        line = lines[at]
        code, comment = split(line)
        scopes.read(code)
        stripped = code.strip()
        if (comment is not None and stripped and scopes.declares() and not NOT_DECLARED.match(stripped)
                and not stripped.endswith(("{", ":"))):
            column = line.index("//", len(code))
            out.append(line[:column] + "///< " + " ".join(described([comment])))
        else:
            out.append(line)
        at += 1
    return out


with open(sys.argv[1], encoding="utf-8") as header:
    print("\n".join(filtered(sys.argv[1], header.read().splitlines())))
