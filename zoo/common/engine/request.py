"""One request: what it was asked, what it has drawn and what it holds; and how a caller's prompt and parameters become that."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from torch import Tensor

from zoo.common.engine.pages import Node
from zoo.common.engine.text import Texts
from zoo.common.reading import shown
from zoo.common.rollouts import SamplingParams, seed_of_sample
from zoo.common.rows import check_dense


@dataclass(eq=False)
class Request:
    """One request. `tokens` is the prompt and what was drawn; the first `computed` of them have rows in memory.

    params names its seed and every token that ends it
    top    how many of the most likely tokens are noted of each row that draws
    texts  what reads stop strings, and gives the record its text; None for a request in token ids without any
    nodes  cached pages that the first entries of `pages` are
    pure   every row in memory was pushed by the weights now loaded, so its pages may be shared
    exact, versions, log-probabilities: see Completion
    """

    request_id: str
    order: int
    prompt_length: int
    params: SamplingParams
    scores_prompt: bool
    tokens: list[int]
    computed: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    filtered_log_probs: list[float] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    pure: bool = True
    exact: bool = True
    ended: bool = False
    top: int = 0
    top_ids: list[tuple[int, ...]] = field(default_factory=list)
    top_log_probs: list[tuple[float, ...]] = field(default_factory=list)
    texts: Texts | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def text(self) -> str | None:
        """What was drawn, up to the stop string."""
        return None if self.texts is None else self.texts.cut(self.output, self.params.stop)

    @property
    def pending(self) -> int:
        """Rows still to be pushed; the last of them draws the next token."""
        return len(self.tokens) - self.computed

    def mark(self, rows: range, version: str) -> None:
        """Notes who pushed `rows`. A row whose token is already drawn keeps the weights that drew it."""
        for row in rows:
            if row == len(self.versions):
                self.versions.append(version)
            elif row < self.prompt_length - 1:
                self.versions[row] = version

    def rewind(self) -> None:
        """Back to the last token that was drawn with all its numbers, no row in memory: a step broke off at any point.

        So may this: the count of drawn tokens that everything else is cut to is written first.
        """
        drawn = len(self.filtered_log_probs)
        del self.tokens[self.prompt_length + drawn :]
        if drawn and self.finish_reason() is not None:  # it had no time to end, so it draws that token again
            drawn -= 1
        del self.filtered_log_probs[drawn:]
        del self.top_ids[drawn:]
        del self.top_log_probs[drawn:]
        del self.log_probs[drawn:]
        del self.tokens[self.prompt_length + drawn :]
        del self.versions[len(self.tokens) - 1 :]
        del self.prompt_log_probs[len(self.versions) :]
        self.ended = False
        self.forget()

    def forget(self) -> None:
        """It holds nothing any more."""
        self.computed = 0
        self.slot = 0
        self.pages = []
        self.nodes = []
        self.pure = True

    def finish_reason(self) -> str | None:
        """Whether the last token ends the request, and why."""
        if self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        if self.params.stop and self.texts is not None and self.texts.ended(self.output, self.params.stop):
            return "text"
        return "length" if len(self.tokens) - self.prompt_length == self.params.max_new_tokens else None


def params_of_sample(params: SamplingParams | None, index: int) -> SamplingParams | None:
    """What sample `index` of a prompt is asked: the same under a seed of its own. What is no SamplingParams is refused elsewhere."""
    if not isinstance(params, SamplingParams) or params.seed is None:
        return params
    return replace(params, seed=seed_of_sample(params.seed, index))


def read_prompt(prompt_ids: Sequence[int] | Tensor) -> list[int]:
    """A prompt as a list. ValueError for what is no row of integers, or empty."""
    if isinstance(prompt_ids, Tensor):
        check_dense("a prompt", prompt_ids)
        if prompt_ids.dim() != 1:
            raise ValueError(f"a prompt must be one row of token ids, not a tensor of shape {list(prompt_ids.shape)}")
    # sets and mappings have no order
    if isinstance(prompt_ids, str | bytes | Set | Mapping) or not hasattr(prompt_ids, "__len__"):
        raise ValueError(f"a prompt must be a sequence of token ids, not {kind_of(prompt_ids)}")
    values = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else prompt_ids
    if not len(values):
        raise ValueError("the prompt is empty: at least one token must be read before one can be drawn")
    tokens = []
    for token in values:
        try:
            if isinstance(token, bool):
                raise TypeError
            tokens.append(operator.index(token))
        except TypeError:
            raise ValueError(f"token ids are integers, not {shown(token)}") from None
    return tokens


def kind_of(given: object) -> str:
    """What was given where token ids belong, with a hint where they are inside it: `apply_chat_template` gives such a mapping."""
    if isinstance(given, Mapping) and "input_ids" in given:
        return f'a {type(given).__name__}: its ["input_ids"] are the token ids'
    return shown(given)
