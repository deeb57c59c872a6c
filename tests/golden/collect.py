"""What a small model does, as hashes: scores, gradients, published tensors, cached bytes, decoded logits, drawn tokens.

Entries are named by what they mean and by published tensor names. What a change of the code's structure may have to adapt is in
the first part of this file alone.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden.geometries import CODES, GEOMETRIES
from zoo.common.engine import Engine
from zoo.common.registry import model_class
from zoo.common.rollouts import SamplingParams
from zoo.common.rows import Rows

# The adapter: how a model is made, rows are pushed, and what the tensors that a memory shows mean.

DTYPES = {"aligned": torch.bfloat16, "fp8": torch.bfloat16, "transformers": torch.float32}
CACHED = {
    "k": "keys",
    "v": "values",
    "latent": "latent rows",
    "index_codes": "index keys, codes",
    "index_scales": "index keys, scales",
    "index": "index keys",
    "window": "rows, one a token",
    "csa": "compressed rows of 4",
    "hca": "compressed rows of more",
    "csa_open": "open windows of 4",
    "index_open": "open windows of the index",
    "hca_open": "open windows of more",
    "delta_start": "state, in FP32",
    "delta_rounded": "state, as rows read it",
    "delta_k": "open chunk, keys",
    "delta_v": "open chunk, values",
    "delta_u": "open chunk, corrected values",
    "delta_beta": "open chunk, strengths of writing",
    "delta_decay": "open chunk, sums of log-decay",
    "delta_inverse": "open chunk, inverse",
    "delta_carry": "rows before the convolution",
}


def made(fields: dict[str, Any], role: str, program: str, device: str) -> Any:
    """A model of random weights; "rl" and "serving" have the same ones."""
    kind = model_class(fields, role)
    return kind.from_config(kind.family.config.from_hf(fields), seed=11, dtype=DTYPES[program], device=device, program=program)


def cached_bytes(memory: Any, pages: list[int], length: int, slot: int) -> dict[str, list[Tensor]]:
    """What one sequence has in memory, each kind's layers in order."""
    return {CACHED[name]: list(layers) for name, layers in memory.written(pages, length, slot).items()}


def pushed_rows(counts: list[int], contexts: list[int], device: str) -> Rows:
    return Rows.pushed(counts, contexts, device)


# From here on public calls only.

LENGTHS = {"cpu": (130, 1, 70, 270), "cuda": (130, 1, 70, 270, 2200)}  # the longest crosses a key segment
SLOW_LENGTHS = (100, 1, 33, 70)  # on a CPU, of models that choose what a row reads
CHUNKS = (1, 7, 64, 65, 129, 500, 1023)
DECODED = 5  # tokens at the end of each document
TOP_K = 5
PAGE_SIZES = (16, 64)
SAMPLED = (
    SamplingParams(seed=1, temperature=0.7, top_p=0.9),
    SamplingParams(seed=2, temperature=1.3, top_k=20),
    SamplingParams(seed=3, min_p=0.02),
    SamplingParams(seed=4, temperature=0.8, top_k=60, top_p=0.95, min_p=0.001),
    SamplingParams(seed=5, temperature=0.0),
)


class Digest:
    """A hash of named tensors and numbers: names, dtypes, shapes, bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            self._hash.update(f"{name} none\n".encode())
            return
        self._hash.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        self._hash.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    @property
    def text(self) -> str:
        return self._hash.hexdigest()[:24]


def digest(*tensors: Tensor | None) -> str:
    whole = Digest()
    for tensor in tensors:
        whole.add("", tensor)
    return whole.text


@dataclass(frozen=True)
class Case:
    """One model under one program."""

    architecture: str
    geometry: str
    program: str

    @property
    def name(self) -> str:
        return f"{self.architecture} {self.geometry}, {self.program}"

    @property
    def fields(self) -> dict[str, Any]:
        return GEOMETRIES[self.architecture][self.geometry]

    def subject(self, device: str) -> Subject:
        """Built anew, so that a test may break it."""
        trainer, server = (made(self.fields, role, self.program, device) for role in ("rl", "serving"))
        lengths = SLOW_LENGTHS if device == "cpu" and "index_topk" in self.fields else LENGTHS[device]
        generator = torch.Generator().manual_seed(len(lengths))
        documents = [torch.randint(3, self.fields["vocab_size"], (length,), generator=generator).to(device) for length in lengths]
        return Subject(trainer, server, documents, device)


def cases(device: str) -> list[Case]:
    """The program `transformers` runs on a CPU alone."""
    served = [
        Case(architecture, geometry, "fp8" if geometry == CODES else "aligned")
        for architecture, each in GEOMETRIES.items()
        for geometry in each
    ]
    return served if device == "cuda" else served + [Case(architecture, "tiny", "transformers") for architecture in GEOMETRIES]


@dataclass
class Subject:
    """A trainer and a server of equal weights, and fixed documents."""

    trainer: Any
    server: Any
    documents: list[Tensor]
    device: str

    def entries(self) -> dict[str, str]:
        """Everything, by what it means; on a CPU by one thread, since torch may add a gradient's rows in an order of its threads."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return {**self.weights(), **self.scores(), **self.padded(), **self.gradients(), **self.served(), **self.drawn()}
        finally:
            torch.set_num_threads(threads)

    def weights(self) -> dict[str, str]:
        published = Digest()
        for name, tensor in sorted(self.trainer.published_tensors()):
            published.add(name, tensor)
        return {"published tensors": published.text, "content hash": self.trainer.weights_version}

    @torch.no_grad()
    def scores(self) -> dict[str, str]:
        """Documents packed, alone and in another order; entropy, the most likely tokens, and scores under a sampler's filters."""
        out = {}
        for name, documents in (("packed", self.documents), ("in reverse", self.documents[::-1])):
            out[f"log_prob, {name}"] = digest(self.trainer.score(*packed(documents)))
        out["log_prob, alone"] = digest(*(self.trainer.score(*packed([document])) for document in self.documents))
        ids, starts = packed(self.documents)
        scores = self.trainer.score(ids, starts, target_ids=ids.flip(0), entropy=True, top_k=TOP_K)
        out["log_prob, of given targets"] = digest(scores.log_prob_R)
        out["entropy"] = digest(scores.entropy_R)
        out["most likely tokens"] = digest(scores.top_ids_RK, scores.top_log_prob_RK)
        filtered = self.trainer.score(ids, starts, sampling=SAMPLED[: len(self.documents)], entropy=True, top_k=TOP_K)
        out["log_prob, filtered"] = digest(filtered.log_prob_R)
        out["entropy, at a temperature"] = digest(filtered.entropy_R)
        out["most likely tokens, at a temperature"] = digest(filtered.top_ids_RK, filtered.top_log_prob_RK)
        return out

    @torch.no_grad()
    def padded(self) -> dict[str, str]:
        """A batch [B, T], padded on both sides."""
        first = self.documents[0]
        second = self.documents[2]
        ids = torch.zeros(2, len(first) + 3, dtype=torch.int64, device=self.device)
        mask = torch.zeros_like(ids)
        for row, document, begin in ((0, first, 3), (1, second, 0)):
            ids[row, begin : begin + len(document)] = document
            mask[row, begin : begin + len(document)] = 1
        out = self.trainer(ids, attention_mask=mask, labels=torch.where(mask == 1, ids, -100))
        return {"padded batch, loss": digest(out.loss), "padded batch, logits": digest(out.logits)}

    def gradients(self) -> dict[str, str]:
        """Of every published tensor, a layer's together."""
        self.trainer.zero_grad()
        ids, starts = packed(self.documents)
        scores = self.trainer.score(ids, starts, entropy=True)
        share_R = (torch.arange(len(ids), device=self.device) % 7 - 3).float() / len(ids)
        ((scores.log_prob_R * share_R).sum() + scores.entropy_R.mean() / 4).backward()
        owners = {parameter.untyped_storage().data_ptr(): parameter for parameter in self.trainer.parameters()}
        parts: dict[str, Digest] = {}
        for name, tensor in sorted(self.trainer.published_tensors(aliases=False)):
            gradient = owners[tensor.untyped_storage().data_ptr()].grad
            mine = None if gradient is None else gradient.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            layer = re.match(r".*layers\.\d+(?=\.)", name)
            parts.setdefault(layer[0] if layer else name, Digest()).add(name, mine)
        self.trainer.zero_grad()
        return {f"gradient, {part}": found.text for part, found in parts.items()}

    def served(self) -> dict[str, str]:
        """Prefill at once, in chunks, and with the last tokens decoded: what was scored, and all cached bytes after every push."""
        lengths = tuple(len(document) for document in self.documents)
        before = tuple(max(0, length - DECODED) for length in lengths)
        steps = [tuple(int(step < min(length, DECODED)) for length in lengths) for step in range(DECODED)]
        out = {}
        for name, plan, decoded, page_size in (
            ("prefill at once", [lengths], [], PAGE_SIZES[0]),
            ("prefill in chunks", chunked(lengths), [], PAGE_SIZES[1]),
            ("decode", [before], steps, PAGE_SIZES[0]),
        ):
            session = Session(self.server, self.documents, page_size, self.device)
            for counts in plan:
                session.push(counts)
            for counts in decoded:
                session.push(counts, decode=True)
            assert session.done == list(lengths)
            out |= {f"{name}, {kind}": found.text for kind, found in session.found.items()}
        return out

    def drawn(self) -> dict[str, str]:
        """The embedded engine's tokens and what it reports of them."""
        stem = self.documents[0].tolist()
        prompts = [stem[:50], stem[:33], self.documents[3][:70].tolist(), stem[:64] + stem[:9], [7]]
        engine = Engine(self.server, pages=40, page_size=PAGE_SIZES[0], max_batch=3, chunk_rows=60)
        params = [replace(each, max_new_tokens=8, ignore_eos=True) for each in SAMPLED]
        records = engine.generate(prompts, params, prompt_log_probs=True)
        return {
            "drawn tokens": digest(*(torch.tensor(record.output_ids) for record in records)),
            "drawn tokens' log_prob": digest(*(torch.tensor(record.log_probs) for record in records)),
            "drawn tokens' log_prob, filtered": digest(*(torch.tensor(record.filtered_log_probs) for record in records)),
            "prompts' log_prob": digest(*(torch.tensor(record.prompt_log_probs[1:]) for record in records)),
        }


def packed(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    starts = [0, *accumulate(len(document) for document in documents)]
    return torch.cat(documents), torch.tensor(starts, dtype=torch.int32, device=documents[0].device)


def chunked(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Pushes of all documents, of sizes that differ between documents and from push to push."""
    plan = []
    left = lengths
    while any(left):
        plan.append(tuple(min(rows, CHUNKS[(len(plan) + 2 * n) % len(CHUNKS)]) for n, rows in enumerate(left)))
        left = tuple(rows - pushed for rows, pushed in zip(left, plan[-1], strict=True))
    return plan


class Session:
    """Documents behind pages, every other one of them, and slots; `found` hashes what is seen by its kind."""

    def __init__(self, server: Any, documents: list[Tensor], page_size: int, device: str) -> None:
        self.server = server
        self.documents = documents
        self.device = device
        needed = [-(-len(document) // page_size) for document in documents]
        self.memory = server.make_memory(2 * sum(needed) + 2, page_size, slots=len(documents) + 1)
        free = iter(range(2 * sum(needed), 0, -2))
        self.pages = [[next(free) for _ in range(count)] for count in needed]
        self.slots = [len(documents) - n if self.memory.slots else 0 for n in range(len(documents))]
        self.memory.clear([page for held in self.pages for page in held], self.slots if self.memory.slots else ())
        self.done = [0] * len(documents)
        self.found: dict[str, Digest] = {}

    def push(self, counts: tuple[int, ...], decode: bool = False) -> None:
        """counts[n] more rows of document n."""
        live = [n for n, count in enumerate(counts) if count]
        rows = pushed_rows([counts[n] for n in live], [self.done[n] for n in live], self.device)
        parts = [self.documents[n][self.done[n] : self.done[n] + counts[n]] for n in live]
        targets = torch.cat([self.documents[n].roll(-1)[self.done[n] : self.done[n] + counts[n]] for n in live])
        table = self.memory.table([self.pages[n] for n in live], [self.slots[n] for n in live], max(map(len, self.pages)))
        if decode:
            self._see("logits", self.server.decode(torch.cat(parts), rows, self.memory, table))
        else:
            hidden = self.server.prefill(torch.cat(parts), rows, self.memory, table)
            self._see("log_prob", self.server.log_prob(hidden, targets))
        for n in live:
            self.done[n] += counts[n]
            for kind, layers in cached_bytes(self.memory, self.pages[n], self.done[n], self.slots[n]).items():
                for layer in layers:
                    self._see(kind, layer)

    def _see(self, kind: str, tensor: Tensor) -> None:
        self.found.setdefault(kind, Digest()).add("", tensor)


# Where bytes were made: torch's CPU products and a GPU's compiler give other bytes elsewhere.


def made_on(device: str) -> dict[str, str]:
    """What must be the same for bytes to be compared."""
    if device == "cuda":
        return {"torch": torch.__version__, "triton": version("triton"), "device": torch.cuda.get_device_name()}
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "maker": cpu_maker()}


def cpu_maker() -> str:
    """Whose CPU this is: torch's matrix library has kernels for some makers' alone."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"vendor_id\s*:\s*(\S+)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def collected(device: str, architecture: str | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    """Every case by name, or those of one architecture."""
    for case in cases(device):
        if architecture in (None, case.architecture):
            yield case.name, case.subject(device).entries()


def differing(stored: dict[str, str], found: dict[str, str]) -> list[str]:
    """Entries that are not the same in both, those that only one has among them."""
    return sorted(name for name in {**stored, **found} if stored.get(name) != found.get(name))
