#!/usr/bin/env python3
"""Checks that sources can be compiled as one: presets compile up to 75 at a time, and the sanitizers' sample the whole
library, which is several times faster where each sees LibTorch.

Names in anonymous namespaces are unique in their namespace within the library or a program, and aliases of one name mean the same. Each
test source has a namespace of its own.
Prints each breach; exit 1 if any."""

import collections
import re
import sys
from pathlib import Path

from tracked import ROOT, files

# Compiled by themselves: flags of their own, or CUDA's headers.
ALONE = re.compile(r"^optim/cpu/|/cuda/|/no_(?:cuda|nccl|cuda_devices)\.cpp$")
TYPE = re.compile(r"^(?:template\s*<.*>\s*)?(?:struct|class|enum class|enum)\s+(?:alignas\([^)]*\)\s*)?(\w+)")
FUNCTION = re.compile(r"(\w+)\s*\((.*)\)[^()]*$", re.DOTALL)
ALIAS = re.compile(r"using (\w+) = (.*)")
DECLARED = re.compile(r"using ((?:\w+::)+(\w+))$")
# Not the class of a type within one.
NAMESPACE = re.compile(r"\b[a-z]\w*::")
VALUE = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=|\{|$)")


def plain(text):
    """Without comments, literals and the preprocessor's lines."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', '""', text, flags=re.DOTALL)
    text = re.sub(r"^\s*#(?:.*\\\n)*.*", "", text, flags=re.MULTILINE)
    literal_or_comment = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|(?<!\w)\'(?:\\.|[^\'\\])\''
    return re.sub(literal_or_comment, lambda found: "" if found[0].startswith("//") else '""', text)


def statements(text, begin):
    """What stands directly in the braces that open at `begin`: declarations, and heads of definitions."""
    depth, head = 0, ""
    for character in text[begin:]:
        if character == "{":
            depth += 1
            if depth == 2:
                yield " ".join(head.split()) + " {"
            if depth <= 2:
                head = ""
        elif character == "}":
            depth -= 1
            if depth == 0:
                return
            head = ""
        elif depth == 1:
            if character == ";":
                yield " ".join(head.split())
                head = ""
            else:
                head += character


def parameter_types(text):
    """Of a function's parameters, without their names and defaults."""
    types, depth, begin = [], 0, 0
    for index, character in enumerate(text + ","):
        depth += (character in "<([{") - (character in ">)]}")
        if character == "," and depth == 0:
            parameter = text[begin:index].split("=")[0].strip()
            types.append(re.sub(r"(?<=[\w>&*])(?:(?<=[>&*])|\s)\s*\w+$", "", parameter))
            begin = index + 1
    return ", ".join(types)


def namespaces_around(text, index):
    """The name of the namespace in which `index` lies."""
    opened = []
    for found in re.finditer(r"^(?:namespace ([\w:]+) \{|(\}))", text[:index], re.MULTILINE):
        if found[1]:
            opened.append(found[1])
        elif opened and text.count("{", 0, found.start()) - text.count("}", 0, found.start()) == len(opened):
            opened.pop()
    return "::".join(opened)


def name_of(statement):
    """What a declaration must not share with another one; None for what may be repeated."""
    head = statement.removesuffix(" {").strip()
    if not head or head.startswith(("using ", "namespace ", "typedef ", "static_assert", "TEST", "TORCH_", "INSTANTIATE_")):
        return None
    found = TYPE.match(head)
    if found:
        return found[1]
    before_value = head.split("=")[0]
    if "(" in before_value:
        function = FUNCTION.search(re.sub(r"\)\s*(?:const|noexcept|->.*|:.*)?$", ")", head))
        # Overloads differ in their parameters' types.
        return f"{function[1]}({parameter_types(function[2])})" if function else None
    value = VALUE.search(before_value + "=")
    return value[1] if value and not value[1][0].isdigit() else None


def breaches():
    where = collections.defaultdict(set)
    aliases = collections.defaultdict(dict)
    for name in files(".cpp"):
        folder = name.split("/")[0]
        if folder == "tests" or ALONE.search(name):
            continue
        scope = "the library"
        if folder in ("bench", "examples"):
            # Executables of one folder are apart from each other.
            scope = "/".join(name.split("/")[:2])
        elif folder == "tools":
            scope = folder
        text = plain((ROOT / name).read_text())
        for opened in re.finditer(r"^namespace \{", text, re.MULTILINE):
            outer = namespaces_around(text, opened.start())
            for statement in statements(text, opened.end() - 1):
                declared = name_of(statement)
                if declared:
                    where[scope, outer, declared].add(name)
                elif alias := ALIAS.match(statement):
                    # Sources write the same type from different namespaces.
                    aliases[scope, outer, alias[1]][name] = NAMESPACE.sub("", alias[2])
                elif used := DECLARED.match(statement):
                    aliases[scope, outer, used[2]][name] = NAMESPACE.sub("", used[1])
    for declaration, means in aliases.items():
        if len(set(means.values())) > 1 or declaration in where:
            where[declaration].update(means)
    for (_, namespace, declared), names in sorted(where.items()):
        if len(names) > 1:
            yield (f"{', '.join(sorted(names))}: each has {declared} in an anonymous namespace of {namespace or 'the global one'}; "
                   "they are compiled as one: give one another name, or share it")
    for name in files("_test.cpp"):
        stem = Path(name).stem
        if not re.search(rf"^namespace (?:[\w:]+::)?{stem} \{{", (ROOT / name).read_text(), re.MULTILINE):
            yield f"{name}: expected a namespace of its own, ...::{stem}: test sources are compiled as one"


found = list(breaches())
print("\n".join(found) or "unity: no two sources that are compiled as one share a name")
sys.exit(1 if found else 0)
