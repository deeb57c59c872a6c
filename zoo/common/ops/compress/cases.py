"""Cases of compress: packed documents, and the same documents pushed in pieces through slots."""

from __future__ import annotations

from typing import Any

import torch

from zoo.common.history import OpenWindows, WholeWindows
from zoo.common.ops.cases import Case, Documents, Draw, Trial, pushes, repeat, starts_of
from zoo.common.ops.compress.windows import Window
from zoo.common.program import Program
from zoo.common.rows import Rows
from zoo.testing import Args, Plan, assert_place_law, assert_row_law, assert_same_bytes, assert_split_law, split_plans


def _call(t: Trial, args: Args) -> Any:
    rows = Rows.packed(torch.tensor(starts_of(args["lengths"]), device=args["rows_RC"].device))
    history = WholeWindows("open")
    return t.op("compress")(args["rows_RC"], args["ape_WP"], history, rows, args["width"], program=t.program)


def _push(t: Trial, plan: Plan, window: Window, slots: list[int], fill: float) -> dict[str, Any]:
    """The documents pushed by `plan` through `slots`; all slots hold `fill` at first, since a row is read once it is written."""
    rows_RC = t.args["rows_RC"]
    lengths = t.args["lengths"]
    pool = torch.full((max(slots) + 2, window.held, rows_RC.shape[1]), fill, dtype=rows_RC.dtype, device=rows_RC.device)
    out = torch.full((rows_RC.shape[0], t.args["width"]), torch.nan, dtype=t.program.torch_dtype, device=rows_RC.device)
    for live, rows, index in pushes(plan, lengths, rows_RC.device):
        history = OpenWindows(pool, torch.tensor([slots[n] for n in live], device=rows_RC.device), "open")
        out[index] = t.op("compress")(rows_RC[index], t.args["ape_WP"], history, rows, t.args["width"], program=t.program)
    return {"out": out, "open": [pool[slot][window.live(length)] for slot, length in zip(slots, lengths, strict=True)]}


def _case(
    name: str, lengths: list[int], tokens: int, width: int, overlaps: bool, kind: str = "normal", *, device_sized: bool = False
) -> Case:
    window = Window(tokens, overlaps)
    columns = width * (2 if overlaps else 1)

    def make(seed: int, device: torch.device | str, dtype: torch.dtype) -> Args:
        draw = Draw(seed, device, torch.promote_types(dtype, torch.float32))
        return {
            "rows_RC": draw.floats(sum(lengths), 2 * columns, kind=kind, scale=2.0),
            "ape_WP": draw.floats(tokens, columns),
            "lengths": lengths,
            "width": width,
        }

    def split(t: Trial) -> None:
        slots = [2 * n + 1 for n in range(len(lengths))]
        plans = split_plans(lengths, edges=(tokens, 64), seed=t.seed)
        assert_split_law(lambda plan: _push(t, plan, window, slots, torch.nan), plans)
        pushed = _push(t, plans["at random"], window, slots, 0.0)["out"]
        assert_same_bytes(pushed, t.call(), "split law: pushed against packed")

    def place(t: Trial) -> None:
        plan = split_plans(lengths, seed=t.seed)["at random"]
        count = len(lengths)
        places = {
            "in order": (list(range(1, count + 1)), 0.0),
            "scattered among NaN": ([3 * n + 2 for n in reversed(range(count))], torch.nan),
        }
        assert_place_law(lambda p: _push(t, plan, window, *p), places)

    laws = {
        "row": lambda t: assert_row_law(t.call, t.args, Documents("rows_RC"), seed=t.seed),
        "split": split,
        "place": place,
        "repeat": repeat,
    }
    return Case(name, "compress", make, _call, laws, ("rows_RC", "ape_WP"), device_sized, kind=kind)


def cases(program: Program) -> list[Case]:
    return [
        _case("four tokens, overlapping", [1, 3, 4, 5, 9, 33], 4, 7, True),
        _case("sixteen tokens", [15, 16, 17, 50], 16, 12, False),
        _case("two tokens, cancelling", [9, 2], 2, 5, False, "cancel"),
        _case("128 tokens", [127, 130, 257], 128, 8, False),
        _case("deepseek-v4 csa", [1000, 3, 593], 4, 512, True, device_sized=True),
        _case("deepseek-v4 hca", [1000, 127, 593], 128, 512, False, device_sized=True),
    ]
