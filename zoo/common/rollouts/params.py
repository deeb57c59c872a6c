"""What a request asks of the sampler, and the seeds of several samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from zoo.common.reading import shown
from zoo.common.row_sampling import DrawParams
from zoo.common.rows import is_whole


@dataclass(frozen=True)
class SamplingParams(DrawParams):
    """The sampling program of one request: how its tokens are drawn (see `DrawParams`), and when it ends.

    temperature, top_k, top_p, min_p
                    as in `DrawParams`
    seed            None: an engine gives every sample a fresh one and records it (greedy draws need none), so a group of samples of one
                    prompt is no group of clones
    max_new_tokens  at least 1
    stop_token_ids  ids that end the request, besides the model's end-of-sequence ids unless ignore_eos
    stop            texts that end the request as soon as what was drawn holds one of them; the engine needs a tokenizer for them

    Numbers may be numpy's; they become Python's. ValueError, naming the number, for anything else.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("max_new_tokens", least=1)
        if not isinstance(self.stop_token_ids, Iterable):
            raise ValueError(f"stop_token_ids must be a sequence of token ids, not {shown(self.stop_token_ids)}")
        tokens = tuple(self.stop_token_ids)
        for token in tokens:
            if not is_whole(token) or token < 0:
                raise ValueError(f"stop_token_ids must be integers of at least 0, not {shown(token)}")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, tokens)))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {shown(self.ignore_eos)}")
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, Iterable):
            raise ValueError(f"stop must be a text or several, not {shown(texts)}")
        texts = tuple(texts)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold texts of at least one character, not {shown(text)}")
        object.__setattr__(self, "stop", texts)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stop_token_ids": list(self.stop_token_ids), "stop": list(self.stop)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """The inverse of `to_dict`; absent fields take their defaults, ValueError for a name that is no field."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"SamplingParams has no {', '.join(sorted(map(shown, unknown)))}")
        return cls(**values)


def seed_of_sample(seed: int, index: int) -> int:
    """The seed of sample `index` of a request for several with one seed: the seed itself for sample 0, else 64 hashed bits of both."""
    return seed if index == 0 else hashed_seed("sample", seed, index)


def hashed_seed(*parts: str | int) -> int:
    """64 bits that nothing but `parts` decides: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:8], "little")
