"""The pictures of the documentation: `python -m benchmarks.figures [FOLDER]` writes idea.svg and cost.svg, by default into docs/.

cost.svg is drawn from benchmarks/results/h200.jsonl alone: the last row of each measurement. grpo.svg is drawn where there are rows of
benchmarks/grpo.py, in benchmarks/results/h200_grpo.jsonl. Equal rows give equal files.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results" / "h200.jsonl"
GRPO_ROWS = ROWS.with_name("h200_grpo.jsonl")
NAMES = {
    ("qwen3", "0.6b"): "Qwen3-0.6B",
    ("qwen3", "1.7b"): "Qwen3-1.7B",
    ("qwen3", "8b"): "Qwen3-8B",
    ("qwen3_moe", "30b-a3b"): "Qwen3-30B-A3B",
    ("qwen3_5", "4b"): "Qwen3.5-4B",
    ("qwen3_5_moe", "35b-a3b"): "Qwen3.5-35B-A3B",
}
INK = "#1b1f24"
SOFT = "#5a6472"
LINE = "#dde2e8"
PAGE = "#ffffff"
FASTER = "#1a7f4b"
SLOWER = "#b42318"
CALM = "#e7f1ec"
WARM = "#f3f5f8"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
SUBTITLE = (
    "One NVIDIA H200. A dot is one measurement: the zoo's time over its rival's, the last row of each in benchmarks/results/h200.jsonl."
)
Point = tuple[str, float]  # what was measured, our time over the rival's


class Drawing:
    """An SVG of fixed size; every call adds one element."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        self.parts = [f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" rx="10" fill="{PAGE}"/>']

    def text(self, x: float, y: float, text: str, *, size: int = 13, colour: str = INK, anchor: str = "start", bold: bool = False) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, line: str = LINE) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{line}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = LINE, *, dashed: bool = False, arrow: bool = False) -> None:
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}"{dash}/>')
        if arrow:
            self.parts.append(f'<path d="M{x2 - 4:g} {y2 - 6:g} L{x2:g} {y2:g} L{x2 + 4:g} {y2 - 6:g}" fill="none" stroke="{colour}"/>')

    def marker(self, x: float, y: float, colour: str, title: str) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:g}" r="4.5" fill="{colour}" fill-opacity="0.75"><title>{escape(title)}</title></circle>'
        )

    def curve(self, points: Iterable[tuple[float, float]], colour: str, title: str, *, dashed: bool = False) -> None:
        """A line through points; those that lie on it are seen by its title."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}><title>{escape(title)}</title></polyline>'
        )

    def svg(self) -> str:
        body = "\n".join(self.parts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} font-family="{FONT}" role="img">\n{body}\n</svg>\n'


def idea() -> str:
    """One token's log-probability, three ways: the rows are grouped differently, the row's own arithmetic is the same."""
    d = Drawing(960, 430, "Training, prefill and decode group rows differently and give the same bytes")
    log_prob = struct.unpack("f", struct.pack("f", -1.2345678))[0]
    octets = struct.pack(">f", log_prob).hex(" ")
    ways = (
        ("Training", "documents packed into one batch", ((0, 4, "other"), (4, 8, "own"), (12, 3, "other"))),
        ("Serving, prefill", "chunks of the prompt, pages of memory", ((0, 5, "own"), (6, 3, "own"))),
        ("Serving, decode", "a token at a time, inside a CUDA graph", tuple((2 * i, 1, "own") for i in range(8))),
    )
    places = (9, 6, 10)  # where the sixth token of the document stands among the squares of each way
    for column, ((name, how, groups), place) in enumerate(zip(ways, places, strict=True)):
        left = 30 + 310 * column
        d.text(left, 38, name, size=16, bold=True)
        d.text(left, 58, how, colour=SOFT)
        for first, count, whose in groups:
            for i in range(first, first + count):
                fill = FASTER if i == place else CALM if whose == "own" else WARM
                d.box(left + 17 * i, 76, 15, 26, fill)
        d.line(left + 130, 112, left + 130, 150, SOFT, arrow=True)
        d.box(left, 290, 260, 62, PAGE, line=FASTER)
        d.text(left + 130, 315, f"log p(token 6) = {log_prob:.7f}", anchor="middle")
        d.text(left + 130, 338, octets, size=16, anchor="middle", bold=True, colour=FASTER)
        d.line(left + 130, 246, left + 130, 284, SOFT, arrow=True)
    d.box(30, 158, 880, 82, CALM, line=FASTER)
    d.text(470, 188, "one model, written once, over the same ops", size=16, anchor="middle", bold=True)
    d.text(
        470,
        211,
        "Each op states where it rounds and in which order it adds. What it gives for a row depends on that row and on",
        anchor="middle",
    )
    d.text(470, 229, "what the row may read: not on its neighbours, the batch, the chunk, the page, the launch.", anchor="middle")
    d.text(470, 386, "the same four bytes", size=16, anchor="middle", bold=True, colour=FASTER)
    d.text(
        470,
        408,
        "so the trainer's probability of a token is the one it was drawn with: on the sampler's weights their ratio is exactly 1",
        anchor="middle",
        colour=SOFT,
    )
    return d.svg()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last(rows: Iterable[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """The last row of each measurement; `names` are the fields that tell measurements apart."""
    return list({tuple(json.dumps(row.get(name)) for name in names): row for row in rows}.values())


def models(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Whole models against the same drivers on the `unaligned` program."""
    measured = [row for row in rows if row["kind"] == "model" and "ratio" in row]
    out: dict[str, list[Point]] = {}
    for row in last(measured, "arch", "size", "layers", "what", "batch", "context", "documents", "length", "checkpointing"):
        what = row["what"]
        case = (
            f"{what}, batch {row['batch']}, context {row['context']}"
            if what == "decode"
            else f"{what}, {row['documents']} x {row['length']}"
        )
        checkpointed = ", checkpointed" if row.get("checkpointing") else ""
        name = f"{NAMES[row['arch'], row['size']]}, {'decode' if what == 'decode' else 'prefill, score, train'}"
        out.setdefault(name, []).append((f"{row['layers']} layers, {case}{checkpointed}", row["ratio"]))
    return out


def serving(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """The plugin against stock SGLang as it comes: the last run that measured both, workload by workload."""
    found: dict[str, dict[str, Point]] = {}
    for row in rows:
        if row["kind"] == "sglang ratio" and row["rival"] == "stock fa3" and None not in row["zoo_over_it"].values():
            points = found.setdefault(f"{NAMES[row['arch'], row['size']]} in SGLang", {})
            for what, speed in row["zoo_over_it"].items():
                case = f"{what.replace('x', ' requests of ')} new tokens" if "x" in what and what[0].isdigit() else what
                points[what] = (f"{row['layers']} layers, {case}", 1 / speed)
    return {name: list(points.values()) for name, points in found.items()}


def ops(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Each op at every shape and number of rows against the fastest unaligned kernel found."""
    out: dict[str, list[Point]] = {}
    for row in last((row for row in rows if row["kind"] == "op" and row["ratio"]), "op", "shape", "rows"):
        out.setdefault(row["op"], []).append((f"{row['shape']}, {row['rows']} rows, against {row['rival']}", row["ratio"]))
    return dict(sorted(out.items()))


def cost(rows: list[dict[str, Any]]) -> str:
    """Every measurement is a dot: our time over the rival's on a logarithmic axis, left of 1 the zoo is faster."""
    panels = (
        ("Whole models, against the same code with unaligned kernels", models(rows)),
        ("Serving, against stock SGLang as it comes", serving(rows)),
        ("Single ops, against the fastest unaligned kernel", ops(rows)),
    )
    left = 300
    right = 910
    step = 24
    height = 110 + sum(66 + step * len(panel) for _, panel in panels)
    d = Drawing(960, height, "What equal bytes cost: our time over the rival's on one H200")
    low = math.log(0.19)
    high = math.log(4.0)

    def x(ratio: float) -> float:
        return left + (right - left) * (math.log(ratio) - low) / (high - low)

    d.text(30, 36, "What equal bytes cost", size=18, bold=True)
    d.text(
        30,
        58,
        SUBTITLE,
        colour=SOFT,
    )
    y = 84
    for title, panel in panels:
        y += 18
        d.text(30, y, title, size=14, bold=True)
        y += 20
        top = y + 8
        bottom = top + step * len(panel) + 4
        for ratio in (0.2, 0.25, 0.33, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0):
            d.line(x(ratio), top, x(ratio), bottom, SOFT if ratio == 1.0 else LINE, dashed=ratio == 1.0)
            d.text(x(ratio), y, f"{ratio:g}", size=11, colour=SOFT, anchor="middle")
        for name, points in panel.items():
            y += step
            d.text(left - 12, y + 4, name, size=12, anchor="end")
            for what, ratio in sorted(points, key=lambda point: point[1]):
                d.marker(x(ratio), y, SLOWER if ratio > 1 else FASTER, f"{name}: {what}: {ratio:.3g}")
        y = bottom + 18
    d.text(x(0.98), height - 14, "the zoo is faster", size=12, colour=FASTER, anchor="end")
    d.text(x(1.02), height - 14, "the rival is faster", size=12, colour=SLOWER)
    return d.svg()


SAMPLERS = {  # what a curve of grpo.svg is called, its colour, and whether it is dashed, so that one that lies on another is seen
    "unaligned": ("unaligned kernels", SLOWER, False),
    "embedded": ("aligned, embedded engine", FASTER, False),
    "sglang": ("aligned, stock SGLang", "#1f5fa8", True),
    "http": ("aligned, stock SGLang over HTTP", "#7a5cc0", True),
}
K3_DECADES = (-9, 0)  # the axis of K3; what is smaller, 0 too, lies on its lower end


def grpo(rows: list[dict[str, Any]]) -> str:
    """A line of panels for each model: K3, the share of clipped tokens and the reward at each step, a curve for each sampler."""
    runs = [row for row in last(rows, "arch", "size", "layers", "sampler") if row["kind"] == "grpo" and row["reward"]]
    models = list(dict.fromkeys((row["arch"], row["size"], row["layers"]) for row in runs))
    d = Drawing(960, 96 + 220 * len(models), "GRPO with one arithmetic for trainer and sampler, and with unaligned kernels beside it")
    d.text(30, 36, "GRPO, the same seeds: one arithmetic for trainer and sampler, and unaligned kernels beside it", size=16, bold=True)
    x = 30.0
    for kind, (name, colour, dashed) in SAMPLERS.items():
        if any(row["sampler"] == kind for row in runs):
            d.curve([(x, 58), (x + 24, 58)], colour, name, dashed=dashed)
            d.text(x + 30, 62, name, size=12, colour=SOFT)
            x += 60 + 6.6 * len(name)
    for line, (arch, size, layers) in enumerate(models):
        mine = [row for row in runs if (row["arch"], row["size"], row["layers"]) == (arch, size, layers)]
        top = 112.0 + 220 * line
        d.text(30, top - 18, f"{NAMES[arch, size]}, {layers} layers", size=14, bold=True)
        steps = max(len(row["reward"]) for row in mine)
        clips = max(0.01, *(value for row in mine for value in row["clip_ratio"]))
        low, high = K3_DECADES
        panels = (
            (
                "k3",
                "K3",
                lambda v: (math.log10(max(v, 10.0**low)) - low) / (high - low),
                [(n, f"1e{n}") for n in range(low + 3, high + 1, 3)],
            ),
            ("clip_ratio", "clipped tokens", lambda v: v / clips, [(clips, f"{clips:.1%}")]),
            ("reward", "reward", lambda v: v, [(0.5, "0.5"), (1.0, "1")]),
        )
        for column, (field, title, height, marks) in enumerate(panels):
            left = 64.0 + 305 * column
            right = left + 232
            bottom = top + 140
            d.text(left, top - 2, title, size=12, colour=SOFT)
            for value, label in [(10.0**low if field == "k3" else 0.0, "0"), *((10.0**m if field == "k3" else m, t) for m, t in marks)]:
                y = bottom - 130 * height(value)
                d.line(left, y, right, y, LINE)
                d.text(left - 6, y + 4, label, size=10, colour=SOFT, anchor="end")
            d.text(right, bottom + 16, f"step {steps}", size=10, colour=SOFT, anchor="end")
            for row in sorted(mine, key=lambda row: list(SAMPLERS).index(row["sampler"])):
                name, colour, dashed = SAMPLERS[row["sampler"]]
                points = [
                    (left + (right - left) * i / max(steps - 1, 1), bottom - 130 * min(max(height(value), 0.0), 1.0))
                    for i, value in enumerate(row[field])
                ]
                d.curve(points, colour, f"{name}: {title}, {len(points)} steps, last {row[field][-1]:.3g}", dashed=dashed)
    return d.svg()


def write(folder: Path, rows: Path = ROWS, grpo_rows: Path = GRPO_ROWS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "idea.svg").write_text(idea())
    (folder / "cost.svg").write_text(cost(rows_of(rows)))
    if grpo_rows.exists():
        (folder / "grpo.svg").write_text(grpo(rows_of(grpo_rows)))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
