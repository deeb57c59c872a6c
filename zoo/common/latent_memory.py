"""Memory of latent attention: one latent row a token and layer, and one index key where a layer chooses what it reads.

Like `zoo.common.memory` it moves bytes and computes nothing. A layer without an index of its own reads the choice of the last layer
below it that has one, so it holds no index keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zoo.common.history import TokenRows
from zoo.common.memory import Pages
from zoo.common.rows import Rows


class LatentLayer(Protocol):
    """One layer's latent rows and index keys."""

    def append(self, latent_RC: Tensor, rows: Rows) -> TokenRows: ...

    def append_index(self, key_RE: Tensor, rows: Rows) -> TokenRows: ...


class PackedLatents:
    """Training: the rows pushed are the whole history of their documents. Stateless, so recomputation changes nothing."""

    def append(self, latent_RC: Tensor, rows: Rows) -> TokenRows:
        return TokenRows(latent_RC)

    def append_index(self, key_RE: Tensor, rows: Rows) -> TokenRows:
        return TokenRows(key_RE)


@dataclass
class PagedLatents:
    """One layer's pages, seen through the page table of the sequences now being pushed."""

    latent_PSC: Tensor
    index_PSE: Tensor | None
    page_table_NB: Tensor

    def append(self, latent_RC: Tensor, rows: Rows) -> TokenRows:
        return self._write(latent_RC, self.latent_PSC, rows)

    def append_index(self, key_RE: Tensor, rows: Rows) -> TokenRows:
        assert self.index_PSE is not None, "a layer without an index has no index keys"
        return self._write(key_RE, self.index_PSE, rows)

    def _write(self, new_RE: Tensor, pages_PSE: Tensor, rows: Rows) -> TokenRows:
        if pages_PSE.is_cuda:
            from zoo.common.page_kernels import write_token_rows

            if rows.count:
                write_token_rows(new_RE, pages_PSE, self.page_table_NB, rows)
        else:
            page_size = pages_PSE.shape[1]
            page_R = self.page_table_NB[rows.sequence_R, rows.positions_R // page_size].long()
            pages_PSE.view(-1, pages_PSE.shape[2])[page_R * page_size + rows.positions_R % page_size] = new_RE
        return TokenRows(pages_PSE, self.page_table_NB)


class LatentMemory(Pages):
    """Serving's memory: all layers' pages, latent_LPSC [layers, pages, page_size, C] and index_IPSE for the layers where `full`."""

    def __init__(
        self,
        full: Sequence[bool],
        pages: int,
        page_size: int,
        latent_width: int,
        index_width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(pages, page_size)
        self.full = tuple(full)
        self.latent_LPSC = torch.zeros(len(self.full), pages, page_size, latent_width, dtype=dtype, device=device)
        self.index_IPSE = torch.zeros(sum(self.full), pages, page_size, index_width, dtype=dtype, device=device)

    def buffers(self) -> dict[str, Tensor]:
        return {"latent": self.latent_LPSC, "index": self.index_IPSE}

    def view(self, page_table_NB: Tensor) -> list[PagedLatents]:
        index = iter(self.index_IPSE)
        return [
            PagedLatents(latent, next(index) if full else None, page_table_NB)
            for full, latent in zip(self.full, self.latent_LPSC, strict=True)
        ]
