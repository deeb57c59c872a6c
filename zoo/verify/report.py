"""`zoo verify --report`: one self-contained page: ladder, heat map of differing bytes, operation map, fingerprint."""

from __future__ import annotations

from html import escape
from typing import Any

from zoo.verify.asked import RUNGS
from zoo.verify.ladder import Result
from zoo.verify.map import Place, words

BINS = 96  # columns of the heat map, at most
CELL_HEIGHT = 18
WIDTH = 960
LEFT = 130
_STYLE = """
:root { --ink: #1b1f24; --soft: #5a6472; --line: #dde2e8; --page: #f6f7f9; --card: #fff; --good: #1a7f4b; --bad: #b42318 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a3acb8; --line: #333a43; --page: #15181c; --card: #1d2126; --good: #4fc584; --bad: #ff7a6b }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 26px; margin: 0 0 4px }
h2 { font-size: 18px; margin: 0 0 12px }
p { margin: 0 0 12px; color: var(--soft) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px; margin-top: 20px;
  overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 6px 10px; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 600; font-size: 13px }
td.n, th.n { text-align: right; white-space: nowrap }
tr.rung td { background: var(--page); font-weight: 600 }
tr.idle td { color: var(--soft) }
.good { color: var(--good); font-weight: 600 }
.bad { color: var(--bad); font-weight: 600 }
.verdict { font-size: 18px; font-weight: 600 }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere }
details { margin-top: 10px }
summary { cursor: pointer }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0 }
dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
svg { display: block }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
"""


def page(result: Result, places: list[Place], layers: int, longest: int) -> str:
    """The whole page. `layers` and `longest` bound the heat map."""
    verdict = '<span class="good">Every compared byte is equal.</span>' if result.ok else '<span class="bad">The climb failed.</span>'
    body = [
        f"<h1>{escape(result.arch)} on {escape(result.device)}</h1>",
        f'<p class="verdict">{verdict}</p>',
        f"<section><h2>This run</h2>{_pairs(result.about | _totals(result))}</section>",
        _divergence(result),
        f"<section><h2>Ladder</h2>{_ladder(result)}</section>",
        f"<section><h2>Differing bytes by layer and position</h2>{_heat(result, layers, longest)}</section>",
        f"<section><h2>Operation map</h2>{_map(places)}</section>",
        f"<section><h2>Fingerprint</h2>{_fingerprint(result.fingerprint)}</section>",
    ]
    title = f"<title>zoo verify {escape(result.arch)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}'
    text = "\n".join(body)
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body><main>{text}</main></body></html>\n'


def _divergence(result: Result) -> str:
    first = result.first_divergence
    if first is None:
        where = "" if result.ok else "<p>No place was found: a comparison failed for another reason, which its row names.</p>"
        return where and f"<section><h2>First divergence</h2>{where}</section>"
    named = {"values" if name == "elements" else name: value for name, value in first.items()}
    cells = "".join(f"<dt>{escape(name)}</dt><dd><code>{escape(str(value))}</code></dd>" for name, value in named.items())
    one, other = result.names
    compared = f"<p>{escape(f'{one[:1].upper()}{one[1:]} was compared with {other}.')}</p>" if one else ""
    return f"<section><h2>First divergence</h2>{compared}<dl>{cells}</dl></section>"


def _ladder(result: Result) -> str:
    out = ['<table><tr><th>compared</th><th class="n">values</th><th class="n">bytes</th><th class="n">differing bytes</th>']
    out.append('<th class="n">K3</th><th>verdict</th></tr>')
    for rung, title in RUNGS.items():
        rows = [row for row in result.rows if row.rung == rung]
        idle = [row for row in result.not_run if row["rung"] == rung]
        if not rows and not idle:
            continue
        out.append(f'<tr class="rung"><td colspan="6">{rung}. {escape(title)}</td></tr>')
        for row in rows:
            k3 = "" if row.k3 is None else f"{row.k3:.3g}"
            verdict = '<span class="good">equal</span>' if row.ok else '<span class="bad">FAILED</span>'
            counts = (f"{row.compared:,}", f"{row.compared_bytes:,}", f"{row.differing:,}", k3)
            numbers = "".join(f'<td class="n">{n}</td>' for n in counts)
            out.append(f"<tr><td>{escape(row.what)}</td>{numbers}<td>{verdict}</td></tr>")
        for line in idle:
            what = escape(line["what"])
            reason = escape(line["reason"])
            out.append(f'<tr class="idle"><td>{what}</td><td colspan="4">{reason}</td><td>not run</td></tr>')
    return "".join(out) + "</table>"


def _heat(result: Result, layers: int, longest: int) -> str:
    names = ["log-prob", *[str(layer) for layer in range(layers)]]  # as the tally has them
    width = -(-longest // BINS)
    bins = -(-longest // width)
    counts: dict[tuple[str, int], int] = {}
    for (layer, position), count in result.heat.items():
        cell = (layer, min(position // width, bins - 1))
        counts[cell] = counts.get(cell, 0) + count
    most = max(counts.values(), default=0)
    step = (WIDTH - LEFT) / bins
    height = CELL_HEIGHT * len(names) + 68
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="differing bytes">']
    for i, name in enumerate(names):
        y = i * CELL_HEIGHT
        label = "log-probability" if i == 0 else f"layer {name}"
        out.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{label}</text>')
        for b in range(bins):
            count = counts.get((name, b), 0)
            place = f'x="{LEFT + b * step:.2f}" y="{y}" width="{max(step - 1, 0.5):.2f}" height="{CELL_HEIGHT - 2}"'
            text = f"{label}, positions {b * width} to {min((b + 1) * width, longest) - 1}: {count} bytes"
            out.append(f'<rect {place} fill="{_shade(count, most)}"><title>{text}</title></rect>')
    for b in range(0, bins, max(1, bins // 8)):
        out.append(f'<text x="{LEFT + b * step:.2f}" y="{height - 48}">{b * width}</text>')
    out.append(f'<text x="{LEFT - 8}" y="{height - 48}" text-anchor="end">position</text>')
    out.append(_scale(most, height - 26))
    what = f"log-probabilities and cached bytes of {_rungs(result)}"
    note = f"No byte differs: {what}." if not most else f"Darkest: {most:,} bytes. Counted over {what}."
    return f"<p>{note} One cell is {width} position{'s' if width > 1 else ''} of one layer.</p>{''.join(out)}</svg>"


def _totals(result: Result) -> dict[str, str]:
    return {name.replace("_", " "): f"{count:,}" for name, count in result.totals.items()}


def _rungs(result: Result) -> str:
    """The rungs that ran: "rung 3", "rungs 1, 2 and 3"."""
    ran = sorted({str(row.rung) for row in result.rows})
    if len(ran) < 2:
        return f"rung {ran[0]}" if ran else "no rung"
    return f"rungs {', '.join(ran[:-1])} and {ran[-1]}"


def _scale(most: int, y: int) -> str:
    """What the colours mean, from none to the most."""
    steps = [0] if not most else sorted({0, 1, max(1, round(most / 27)), max(1, round(most * 8 / 27)), most})
    out = [f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">differing bytes</text>']
    for i, count in enumerate(steps):
        x = LEFT + 110 * i
        out.append(
            f'<path d="M{x} {y}h18v{CELL_HEIGHT - 2}h-18z" fill="{_shade(count, most)}"/><text x="{x + 24}" y="{y + 13}">{count:,}</text>'
        )
    return "".join(out)


def _shade(count: int, most: int) -> str:
    """Grey-green for none, then light orange to dark red by the cube root, so that one byte shows."""
    if not count:
        return "#9fc9b0"
    share = (count / most) ** (1 / 3)
    low = (250, 176, 92)
    high = (140, 12, 12)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _map(places: list[Place]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("layer", "op", "byte class", "results", "training", "prefill", "decode"))
    out = [f"<table><tr>{head}</tr>"]
    for p in places:
        phases = "".join(f"<td>{escape(p.launched.get(phase, '-'))}</td>" for phase in ("training", "prefill", "decode"))
        out.append(f"<tr><td><code>{escape(p.layer)}</code></td><td>{escape(p.call)}</td><td>{escape(p.byte_class)}</td>")
        out.append(f"<td>{escape(p.outputs)}</td>{phases}</tr>")
    out.append("</table>")
    for op in dict.fromkeys(p.op for p in places):
        out.append(f"<details><summary>{escape(op)}</summary>{_pairs(words(op))}</details>")
    return "".join(out)


def _fingerprint(parts: dict[str, Any]) -> str:
    out = []
    for name, value in parts.items():
        content = _pairs(value) if isinstance(value, dict) else f"<p><code>{escape(str(value))}</code></p>"
        out.append(f"<details{' open' if name == 'weights' else ''}><summary>{escape(name)}</summary>{content}</details>")
    return "".join(out)


def _pairs(values: dict[str, Any]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in values.items()) + "</dl>"
