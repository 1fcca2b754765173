#!/usr/bin/env python3
"""Checks the structure: include arrows, namespaces, file lengths, checks with words, parallel loops, public headers and what the umbrella brings of them, who
reads the stage.

Prints each breach; exit 1 if any.
"""

import re
import sys

import layers
from tracked import ROOT, files

FLOORS = {"base", "memory", "device", "operators", "paging"}
LEAVES = {"comm", "optim", "offload", "state", "checkpointing"}
LIBRARY = set(layers.folders()) - {"data", "text"}
# Which folders a folder may include, besides itself: of those below it in CMakeLists.txt the ones that this says.
ALLOWED = {
    "base": set(),
    "memory": {"base"},
    "device": {"base", "memory"},
    "operators": {"base", "memory", "device"},
    "paging": {"base", "memory", "device", "operators"},
    **{leaf: FLOORS - {"paging"} for leaf in (*LEAVES, "data")},
    "parallel": {*FLOORS, "comm"},
    # Nothing in the library needs it: users' modules do.
    "fused": {*FLOORS, "comm", "optim", "parallel"},
    # data/ is a library of its own above zeropage, which programs link and the library does not.
    "zero": {*FLOORS, *LEAVES, "parallel"},
    "accumulate": {*FLOORS, *LEAVES, "parallel", "zero"},
    "pipeline": {*FLOORS, *LEAVES, "parallel", "zero", "accumulate"},
    "saving": {*FLOORS, *LEAVES, "parallel", "zero", "accumulate", "pipeline"},
    "planning": LIBRARY - {"profile"},
    # Looks at what a rank does from below: it is told by ledgers, pagers and communicators.
    "profile": {*FLOORS, "comm"},
    # text/ is a library of its own that knows nothing of the others.
    "text": set(),
    "tools": {*LIBRARY, "text"},
    # They are compiled with the public headers alone.
    "examples": {*LIBRARY, "data", "text"},
    "bench": {*LIBRARY, "data", "text", "examples"},
    "tests": {*LIBRARY, "data", "text", "examples", "bench", "cmake"},
}
OWN_INCLUDE = re.compile(r'^#include "([a-z_/]+\.h)"', re.MULTILINE)
MOST_LINES = 500
# The public API: lines of code, for what explains them is wanted.
UMBRELLA, MOST_LINES_BEHIND_IT = "include/zeropage/zeropage.h", 4600
WORDLESS_CHECK = re.compile(r"^\s*(?:TORCH_CHECK|ZP_CHECK)\([^,\"]*\);", re.MULTILINE)
TORCH_FREE = ("comm/launcher/", "tools/", "device/cuda/device_places",
              "device/accelerator_driver", "device/device_places", "include/zeropage/fields.h", "base/format_bytes", "device/host_", "device/no_cuda_devices", "device/page_nodes", "device/topology",
              "pipeline/schedule/", "profile/report/", "state/", "text/", "include/zeropage/text/")
# What zp starts as a program of its own.
NEEDS_TORCH = "tools/plan/"
TORCH_INCLUDE = re.compile(r'^\s*#include <(?:torch|ATen|c10)/', re.MULTILINE)
STAGE_READERS = ("zero/options.cpp", "zero/plan/byte_plan.cpp")
STAGE_PART = re.compile(r"\bstage_?(?:\(\))?\s*(?:\.|->)\s*(?:parameters|gradients|optimizer_state)\b")
STAGE_COMPARED = re.compile(r"\bstage_?(?:\(\))?\s*[!=]=|[!=]=\s*(?:\w+(?:\.|->))*stage_?\b")
COMMENT = re.compile(r"//.*$", re.MULTILINE)
BLOCK = re.compile(r"^namespace (zeropage[\w:]*) \{\n(.*?)^\}  // namespace \1$", re.MULTILINE | re.DOTALL)
DECLARATION = re.compile(r"(?:class|struct|enum class) \w+(?: : \w+)?;\s*|(?:const )?[\w:]+& \w+_of\([^;{]*\);\s*")
# Copies that the host does not wait for, and the memory that they need, have one owner.
PAST_THE_OWNER = re.compile(r"non_blocking=\*/\s*true|\bcopy_\([^;]*,\s*true\)|\.pinned_memory\(|\bpin_memory\(|getPinnedMemoryAllocator|getHostAllocator|"
                            r"cudaMemcpy\w*Async|cudaHostAlloc|cudaMallocHost")
OWNER_OF_COPIES = "device/page_locked.cpp"
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"')
BARE_ENUMERATOR = re.compile(r"(?<![:\w])k[A-Z]\w+")


def behind(header, seen):
    """The headers that users get with `header`, in `seen`."""
    if header in seen:
        return
    seen.add(header)
    for included in OWN_INCLUDE.findall((ROOT / header).read_text()):
        behind(layers.path_of(included), seen)


def reads_stage(text):
    """Whether code asks a stage what it shards; its text and a choice of a stage are no questions.

    >>> reads_stage("if (options.stage.parameters) return;")
    True
    >>> reads_stage("const Stage& stage = flags->options.stage;\\nreturn stage\\n    .optimizer_state;")
    True
    >>> reads_stage("return options().stage.gradients ? 1 : 2;"), reads_stage("return stage_.gradients;")
    (True, True)
    >>> reads_stage("if (options.stage == Stage::kReplicated) return;"), reads_stage("a != options.stage")
    (True, True)
    >>> reads_stage("options.stage = Stage::kParameters;"), reads_stage("out << text_of(options.stage);")
    (False, False)
    >>> reads_stage("{.stage = {.optimizer_state = true}}"), reads_stage("// stage.parameters: see there")
    (False, False)
    """
    code = COMMENT.sub("", text)
    return bool(STAGE_PART.search(code) or STAGE_COMPARED.search(code))


def bare_enumerators(text):
    """Enumerators that a message names without their type, so that nobody can write what it advises.

    >>> bare_enumerators('ZP_CHECK(a, "use kInStep, or ", b);')
    ['kInStep']
    >>> bare_enumerators('ZP_CHECK(a, "use StepWhen::kInStep, or Options::kAllRanks");')
    []
    >>> bare_enumerators('out << "a" << kBytes << "b";  // says "kNvme"')
    []
    """
    return [name for literal in LITERAL.findall(COMMENT.sub("", text)) for name in BARE_ENUMERATOR.findall(literal)]


def starts_copies_itself(text):
    """Whether code copies beside the host, or has page-locked memory, past device/page_locked.h.

    >>> starts_copies_itself("to.copy_(from, /*non_blocking=*/true);"), starts_copies_itself("to.copy_(from.view({3}), true);")
    (True, True)
    >>> starts_copies_itself("at::empty({3}, at::TensorOptions().pinned_memory(true))")
    True
    >>> starts_copies_itself("x.to(device, at::kLong, /*non_blocking=*/false, /*copy=*/true)")
    False
    >>> starts_copies_itself("to.copy_(from); device::start_copy(to, from);  // not to.copy_(from, true)")
    False
    """
    return bool(PAST_THE_OWNER.search(COMMENT.sub("", text)))


def foreign_namespaces(folder, text):
    """Namespaces in which a private header of the folder defines something, and which are not the folder's.

    >>> foreign_namespaces("paging", "namespace zeropage::paging {\\nclass Pager {};\\n}  // namespace zeropage::paging\\n")
    []
    >>> foreign_namespaces("paging", "namespace zeropage::memory {\\nclass Pager {};\\n}  // namespace zeropage::memory\\n")
    ['zeropage::memory']
    >>> foreign_namespaces("zero", "namespace zeropage::paging {\\nclass Pins;\\n}  // namespace zeropage::paging\\n")
    []
    >>> foreign_namespaces("zero", "namespace zeropage {\\nX& x_of(const Y& y);\\n}  // namespace zeropage\\n")
    []
    """
    own = f"zeropage::{folder}"
    return [name for name, body in BLOCK.findall(COMMENT.sub(lambda found: found[0] if found[0].startswith("// namespace ") else "", text))
            if name != own and not name.startswith(own + "::") and DECLARATION.sub("", body).strip()]


def lines_of_code(name):
    lines = map(str.strip, (ROOT / name).read_text().splitlines())
    return sum(line != "" and not line.startswith("//") for line in lines)


def breaches():
    umbrella = set()
    behind(UMBRELLA, umbrella)
    total = sum(map(lines_of_code, umbrella))
    if total > MOST_LINES_BEHIND_IT:
        largest = sorted(umbrella, key=lines_of_code, reverse=True)[:5]
        yield (f"{UMBRELLA}: brings {len(umbrella)} headers with {total} lines of code, at most {MOST_LINES_BEHIND_IT}; the largest are "
               f"{', '.join(largest)}: hide what programs do not name behind a declaration")
    owners = layers.owners()
    for header in layers.public_headers():
        if header.removeprefix("include/") not in owners:
            yield f"{header}: is in no table of include/zeropage/README.md, which says who makes it and what it is for"
        marked = header.removeprefix("include/") in layers.outside_the_umbrella()
        if header.count("/") == 2 and marked == (header in umbrella):
            yield (f"{header}: is {'' if header in umbrella else 'not '}behind {UMBRELLA}, so the tables of include/zeropage/README.md "
                   f"must have it {'without' if marked else 'with'} the mark *")
        for included in layers.includes_of((ROOT / header).read_text()):
            if not included.startswith("zeropage/"):
                yield f"{header}: includes {included}, which is private and not installed: hide it behind a declaration"
    for name in files(".h", ".cpp", ".cu", ".cuh"):
        text = (ROOT / name).read_text()
        folder = name.split("/")[0]
        made_by = owners.get(name.removeprefix("include/"), folder)
        for included in layers.includes_of(text):
            of = owners.get(included, included.split("/")[0])
            if not included.startswith("zeropage/") and folder == "examples":
                continue
            if made_by in ALLOWED and of and of != made_by and of not in ALLOWED[made_by]:
                yield f"{name}: includes {included} of {of}/, but {made_by}/ may include only {sorted(ALLOWED[made_by])}"
        # Tables of public options, which are found by the options' namespace, and the half of a public class that a device has.
        if folder in layers.folders() and name.endswith((".h", ".cuh")) and not name.endswith("_fields.h") and name != "device/pending_on_device.h":
            for namespace in foreign_namespaces(folder, text):
                yield f"{name}: defines something in {namespace}, but private code of {folder}/ is in zeropage::{folder}"
        lines = text.count("\n")
        if lines > MOST_LINES and folder != "tests":
            yield f"{name}: {lines} lines, at most {MOST_LINES}: split it by noun"
        if folder != "tests" and WORDLESS_CHECK.search(text):
            yield f"{name}: a check without a message: say who, expected, got, what to do"
        if name.endswith(".cpp") and folder != "tests" and "at::parallel_for(" in text:
            listed = re.search(rf"zeropage_intra_op_parallel\([^)]*\b{re.escape(name.split('/', 1)[1])}",
                               (ROOT / folder / "CMakeLists.txt").read_text())
            if not listed:
                yield f"{name}: at::parallel_for is serial unless {folder}/CMakeLists.txt lists it in zeropage_intra_op_parallel"
        if folder != "tests" and name not in STAGE_READERS and reads_stage(text):
            yield f"{name}: reads the stage, which {' and '.join(STAGE_READERS)} alone do: ask the byte plan (zero/plan/byte_plan.h)"
        if folder != "tests" and name != OWNER_OF_COPIES and starts_copies_itself(text):
            yield f"{name}: copies beside the host or has page-locked memory of its own, which may be reused under a copy: use device/page_locked.h"
        if folder != "tests":
            for enumerator in bare_enumerators(text):
                yield f"{name}: a message says {enumerator}: name it as one writes it, with its type (StepWhen::kInStep), or in words"
        if name.endswith((".cu", ".cuh")) and TORCH_INCLUDE.search(text):
            yield f"{name}: includes LibTorch, which nvcc would parse for minutes: pass raw pointers and an opaque stream"
        if name.startswith(TORCH_FREE) and not name.startswith(NEEDS_TORCH) and TORCH_INCLUDE.search(text):
            yield f"{name}: includes LibTorch, but the launcher must start without it"


def main():
    found = list(breaches())
    print("\n".join(found) or "structure: arrows, lengths and messages are in order")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
