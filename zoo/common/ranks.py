"""One rank's weights out of a published checkpoint: its slices of the tensors are read, and nothing else of them.

Where codes are decoded at load, a whole matrix is read for a slice of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.common.checkpoint import Checkpoint, check_parameter_dtypes, fill_parameters
from zoo.common.decoded import as_read
from zoo.common.layout import Layout
from zoo.common.program import parse_device, parse_dtype, resolve

if TYPE_CHECKING:
    from zoo.common.family import Family


def load_rank(
    family: Family,
    path_or_hub_id: str | Path,
    layout: Layout,
    ranks: Mapping[str, int],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    program: str = "aligned",
) -> dict[str, Tensor]:
    """The parameters that one rank of a layout holds, by our name, from a local folder or a hub id.

    `ranks`: which of each axis's ranks it is, the first where an axis is not named. Everything that headers can tell is checked
    before any weight is read. ValueError for what `from_pretrained` refuses of the checkpoint (a NaN is found in what this rank reads),
    for a size that does not divide among the ranks, with both numbers, for a part of a block that has one scale, and for pipeline stages.
    """
    if layout.pp > 1:
        raise ValueError(f"layout: pp {layout.pp}, but no family divides its layers into stages yet, only pp 1 can be loaded")
    wanted = parse_dtype(dtype)
    where = parse_device(device)
    source, config = as_read(Checkpoint.open(path_or_hub_id, revision), family, program, wanted)
    config.local(layout)
    table = family.table(config)
    whole = source.match(table)
    usual = resolve(program, where, wanted or source.main_dtype(whole), family.contributors).torch_dtype
    mine = table.local(layout, ranks)
    match = whole.local(mine)
    parameters = {name: torch.empty(entry.shape, dtype=entry.held(usual), device=where) for name, entry in mine.parameters.items()}
    check_parameter_dtypes(source, match, parameters, convert=wanted is not None)
    fill_parameters(parameters, source, match)
    return parameters
