#!/usr/bin/env python3
"""Draws zero/paging.svg: a page's life, where its bytes lie, and one step at stage 3 on a time axis.

    scripts/paging_picture.py            writes the picture
    scripts/paging_picture.py --check    exit 1 if the picture in the tree is another one
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parent.parent / "zero" / "paging.svg"
WIDTH, HEIGHT = 900, 720

PAPER, FRAME, INK, MUTED, LINE = "#ffffff", "#d0d7de", "#1f2328", "#57606a", "#8c959f"
NEUTRAL = "#e6e9ed"
BLUE, BLUE_MID, BLUE_LIGHT = "#2c6cb0", "#a9c9ea", "#dceaf8"  # parameters
ORANGE, ORANGE_MID, ORANGE_LIGHT = "#b8560f", "#f2c79c", "#fbe8d3"  # gradients
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def number(value):
    return f"{value:.1f}".rstrip("0").rstrip(".")


def tag(name, content=None, **attributes):
    words = "".join(f' {key.replace("_", "-")}="{number(value) if isinstance(value, (int, float)) else value}"'
                    for key, value in attributes.items())
    return f"<{name}{words}/>" if content is None else f"<{name}{words}>{content}</{name}>"


def text(x, y, words, style="", anchor="start"):
    """style: a class of the style sheet, or several."""
    attributes = {"class": style} if style else {}
    if anchor != "start":
        attributes["text_anchor"] = anchor
    return tag("text", escape(words), x=x, y=y, **attributes)


def box(x, y, width, height, fill, stroke=LINE, **more):
    return tag("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, **more)


def labelled(x, y, width, height, fill, words, stroke=LINE, style=""):
    middle = text(x + width / 2, y + height / 2 + 4.5, words, style, "middle")
    return box(x, y, width, height, fill, stroke, rx=3) + middle


def line(points, color=LINE, arrow=True, **more):
    path = "M" + " L".join(f"{number(x)},{number(y)}" for x, y in points)
    if arrow:
        more["marker_end"] = f"url(#{ {LINE: 'grey', BLUE: 'blue', ORANGE: 'orange'}[color] })"
    return tag("path", d=path, fill="none", stroke=color, stroke_width=1.6, **more)


def arrow_head(name, color):
    head = tag("path", d="M0,0.5 L8,4 L0,7.5 z", fill=color)
    return tag("marker", head, id=name, viewBox="0 0 8 8", refX=7.5, refY=4, markerWidth=8, markerHeight=8,
               markerUnits="userSpaceOnUse", orient="auto")


# ---- a page's life ----

def life():
    top, height = 66, 44
    states = {"evicted": (30, 110, "no memory"), "fetching": (350, 150, "memory, no values yet"),
              "clean": (606, 106, "operators read"), "dirty": (774, 102, "written to")}
    yield text(30, 38, "A page’s life", "head")
    for name, (x, width, note) in states.items():
        fill = {"evicted": PAPER, "fetching": BLUE_LIGHT}.get(name, BLUE_MID)
        dash = {"stroke_dasharray": "5 3"} if name == "evicted" else {}
        yield box(x, top, width, height, fill, rx=8, **dash)
        yield text(x + width / 2, top + 19, name, "bold", "middle")
        yield text(x + width / 2, top + 35, note, "small", "middle")
    middle = top + height / 2
    yield line([(140, middle), (348, middle)])
    yield text(244, middle - 22, "fault: an operator needs it", "small", "middle")
    yield text(244, middle - 8, "prefetch: the trace has it next", "small", "middle")
    yield line([(500, middle), (604, middle)])
    yield text(552, middle - 8, "all_gather ends", "small", "middle")
    yield line([(712, middle - 9), (772, middle - 9)])
    yield text(742, middle - 16, "a write", "small", "middle")
    yield line([(774, middle + 9), (714, middle + 9)])
    yield text(744, top + height + 15, "own shard", "small", "middle")
    yield text(744, top + height + 30, "to the shard", "small", "middle")
    yield line([(659, top + height), (659, top + 74), (85, top + 74), (85, top + height + 2)])
    yield text(372, top + 67, "evict: after its last use, for room, or at step(); the shard stays", "small", "middle")


# ---- shards and the page ----

def shards():
    top, row, left = 208, 34, 30
    yield text(left, top, "Kept by each rank: its shards", "head")
    yield text(430, top, "On every rank, while it is needed", "head")
    columns = ((84, 62, BLUE_MID, "values"), (151, 78, ORANGE_MID, "gradient"), (234, 62, NEUTRAL, "state"))
    for rank in range(3):
        y = top + 16 + rank * row
        yield text(left, y + 16, f"rank {rank}")
        for x, width, fill, words in columns:
            yield labelled(x, y, width, 23, fill, f"{words} {rank}", style="small")
    yield text(left, top + 16 + 3 * row + 17, "step(): each rank updates the values of its shards.", "small")

    third, x = 144, 430
    page, bucket = top + 16, top + 96
    for rank in range(3):
        yield labelled(x + rank * third, page, third, 23, BLUE_MID, f"values {rank}", style="small")
        yield labelled(x + rank * third, bucket, third, 23, ORANGE_MID, f"gradient {rank}", style="small")
    slots = ((0, 172, "qkv.weight"), (176, 62, "out.weight"), (242, 122, "up.weight"), (368, 36, "bias"))
    for begin, width, words in slots:
        yield box(x + begin, page + 27, width, 19, "none", BLUE, rx=2)
        yield text(x + begin + width / 2, page + 40.5, words, "tiny", "middle")
    yield text(x + 408, page + 40.5, "pad", "tiny")
    yield text(x, page + 62, "the page: all_gather writes where the parameters lie", "small")
    yield text(x, bucket + 39, "the bucket: the page’s gradients, laid out alike", "small")

    yield line([(306, page + 11.5), (428, page + 11.5)], BLUE)
    yield text(367, page + 4, "all_gather", "blue", "middle")
    yield line([(430, bucket + 11.5), (306, bucket + 11.5)], ORANGE)
    yield text(368, bucket + 4, "reduce_scatter", "orange", "middle")


# ---- a step ----

PAGES = 4
FORWARD, BACKWARD, TRANSFER, STEP = 56, 94, 40, 62  # how long each takes, in points
COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}
FIRST_GRADIENT = 0.5  # of a page's backward, when its bucket opens


class Schedule:
    """What paging/pager does with the trace 0 1 2 3 2 1 0: (page, begin, end) for each kind of bar."""

    def __init__(self):
        self.compute, self.gathers, self.reductions, self.resident, self.buckets = [], [], [], [], []
        self.wire_free = 0
        self.came = {}  # page -> (when its memory came, when its values came)

    def transfer(self, kind, page, at):
        begin = max(at, self.wire_free)
        self.wire_free = begin + TRANSFER
        kind.append((page, begin, self.wire_free))
        return self.wire_free

    def fetch(self, page, at):
        self.came[page] = (at, self.transfer(self.gathers, page, at))

    def evict(self, page, at):
        self.resident.append((page, *self.came.pop(page), at))

    def run(self):
        last = PAGES - 1
        self.fetch(0, 0)
        touched = 0
        for page in range(PAGES):  # forward
            if page < last:
                if page > 0:  # for room
                    self.evict(page - 1, touched)
                self.fetch(page + 1, touched)
            begin = max(touched, self.came[page][1])
            touched = begin + FORWARD
            self.compute.append((page, begin, touched))
        self.backward_begins = touched
        opened = None
        for page in reversed(range(PAGES)):
            if page < last:
                self.evict(page + 1, touched)
                if page > 0:
                    self.fetch(page - 1, touched)
            begin = max(touched, self.came[page][1])
            touched = begin + BACKWARD
            self.compute.append((page, begin, touched))
            opens = begin + BACKWARD * FIRST_GRADIENT
            if opened:
                self.buckets.append((*opened, max(opens, self.reductions[-1][2])))
            opened = (page, opens)
            self.transfer(self.reductions, page, touched)
        self.step_begins = self.reductions[-1][2] + 8
        self.buckets.append((*opened, self.step_begins - 8))
        self.evict(0, self.step_begins)
        self.step_ends = self.step_begins + STEP
        return self

    def most_resident(self):
        return max(sum(begin <= at < end for _, begin, _, end in self.resident) for _, at, _, _ in self.resident)


def step():
    top, left = 394, 112
    schedule = Schedule().run()
    scale = (WIDTH - 24 - left) / schedule.step_ends

    def at(time):
        return left + time * scale

    def bar(row, begin, end, fill, words="", stroke=LINE, style="small"):
        return labelled(at(begin), row, (end - begin) * scale, 20, fill, words, stroke, style)

    yield text(30, top, "A step at stage 3 that follows the trace 0 1 2 3 2 1 0", "head")
    compute, wire, pages, bucket = top + 44, top + 76, top + 126, top + 126 + PAGES * 26 + 12
    bottom = bucket + 32
    for time, words in ((0, "forward"), (schedule.backward_begins, "backward"), (schedule.step_begins, "step()")):
        yield line([(at(time), top + 20), (at(time), bottom)], FRAME, arrow=False, stroke_dasharray="4 3")
        yield text(at(time) + 5, top + 32, words, "bold")

    yield text(30, compute + 14, "compute")
    for page, begin, end in schedule.compute:
        yield bar(compute, begin, end, NEUTRAL, str(page))
    yield bar(compute, schedule.step_begins, schedule.step_ends, NEUTRAL, "shards")
    yield text(30, wire + 14, "messages")
    for page, begin, end in schedule.gathers:
        yield bar(wire, begin, end, BLUE, str(page), BLUE, "small white")
    for page, begin, end in schedule.reductions:
        yield bar(wire, begin, end, ORANGE, str(page), ORANGE, "small white")

    yield text(at(0) + 5, wire + 35, "fault", "blue")
    yield text(at(schedule.gathers[1][1]) + 4, wire + 35, "prefetched beside compute", "blue")
    yield text(at(schedule.backward_begins) + 5, wire + 35, "3 and 2 are still there", "blue")
    yield text(at(schedule.reductions[1][1]), wire + 35, "reduced beside the rest of backward", "orange")

    for page, memory, values, gone in schedule.resident:
        y = pages + page * 26
        yield bar(y, memory, values, BLUE_LIGHT, stroke="none")
        yield bar(y, values, gone, BLUE_MID, stroke="none")
        yield box(at(memory), y, (gone - memory) * scale, 20, "none", BLUE, rx=3)
    for page in range(PAGES):
        yield text(30, pages + page * 26 + 14, f"page {page}")
    yield text(30, bucket + 14, "bucket")
    for page, begin, end in schedule.buckets:
        yield bar(bucket, begin, end, ORANGE_LIGHT, str(page), ORANGE)

    yield text(at(0) + 5, pages + 3 * 26 + 14, f"{COUNTS[schedule.most_resident()]} pages at most", "blue")
    yield text(at(0) + 5, bucket + 14, "one bucket at a time", "orange")
    key = bottom + 26
    for x, fill, stroke, words in ((30, BLUE, BLUE, "all_gather of a page"),
                                   (196, ORANGE, ORANGE, "reduce_scatter of its gradients"),
                                   (424, BLUE_LIGHT, BLUE, "fetching"), (516, BLUE_MID, BLUE, "resident")):
        yield box(x, key - 11, 14, 14, fill, stroke, rx=2)
        yield text(x + 20, key, words, "small")


def picture():
    style = (f"text{{font:13px {FONT};fill:{INK}}}.head{{font-size:15px;font-weight:600}}.bold{{font-weight:600}}"
             f".small{{font-size:12px}}.tiny{{font-size:10.5px;fill:{MUTED}}}.blue,.orange{{font-size:12px}}"
             f".blue{{fill:{BLUE}}}.orange{{fill:{ORANGE}}}.white{{fill:{PAPER}}}")
    heads = arrow_head("grey", LINE) + arrow_head("blue", BLUE) + arrow_head("orange", ORANGE)
    title = "A page's life, its shards on three ranks, and one step at stage 3"
    body = [tag("title", title), tag("style", style), tag("defs", heads),
            box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, PAPER, FRAME, rx=8)]
    for y in (168, 360):
        body.append(line([(24, y), (WIDTH - 24, y)], FRAME, arrow=False))
    for part in (life(), shards(), step()):
        body.extend(part)
    return tag("svg", "\n" + "\n".join(body) + "\n", xmlns="http://www.w3.org/2000/svg",
               viewBox=f"0 0 {WIDTH} {HEIGHT}", width=WIDTH, height=HEIGHT, role="img") + "\n"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    if sys.argv[1:] == []:
        PICTURE.write_text(picture(), encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture():
        sys.exit("zero/paging.svg is not what scripts/paging_picture.py draws; run it without --check")
    else:
        print("picture: zero/paging.svg is as drawn")


main()
