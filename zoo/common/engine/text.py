"""Text in and out: the tokenizer and the chat template that lie beside a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zoo.common.reading import check_size, clipped, shown

TOKENIZER_BYTES = 128 << 20  # of tokenizer.json: the largest vocabularies take 40 MB
SLACK = 32  # tokens beside a stop string's own bytes that are decoded to look for it
BROKEN = "\ufffd"  # what a character reads as whose last bytes are not drawn yet


class Texts:
    """What a folder's tokenizer says; read when first needed. ValueError, then, where there is none or it can't be read."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.folder is None:
            raise ValueError(
                "text needs a tokenizer, and the model was not loaded from a folder: give token ids, or Engine(tokenizer=FOLDER)"
            )
        return read_tokenizer(self.folder)

    @cached_property
    def _chats(self) -> Any:
        from transformers import AutoTokenizer  # takes seconds

        assert self.tokenizer is not None and self.folder is not None
        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)

    def ids_of(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text, or of a chat behind which the assistant speaks. ValueError for what is no text, or has no template."""
        if isinstance(prompt, str):
            check_text("a prompt", prompt)
            return self.tokenizer.encode(prompt).ids
        for message in prompt:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ValueError(f"a chat holds messages with role and content, not {shown(message)}")
            check_text("a message's role", message["role"])
            check_text("a message's content", message["content"])
        if not self._chats.chat_template:
            raise ValueError(f"{self.folder} has no chat template: give the text itself, or token ids")
        try:
            text = self._chats.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises whatever its author chose
            raise ValueError(f"the chat template of {self.folder} refuses these messages ({clipped(str(error))})") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of drawn tokens, special ones left out."""
        return self.tokenizer.decode(list(ids))

    def cut(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """The same up to the first stop string."""
        text = self.decode(ids)
        ends = [place for place in (text.find(mark) for mark in stop) if place >= 0]
        return text[: min(ends)] if ends else text

    def ended(self, ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the last of these tokens completes a stop string."""
        reach = max(len(mark.encode()) for mark in stop) + SLACK
        tail = self.decode(ids[-reach:])
        return any(mark in tail for mark in stop) and any(mark in self.decode(ids) for mark in stop)


class Increments:
    """The text of a request piece by piece: a piece is held back while a character of it is incomplete."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._said = 0  # tokens whose text was handed out
        self._from = 0  # where decoding begins: some tokens before, since a tokenizer may join them

    def next(self, ids: Sequence[int], *, last: bool = False) -> str:
        """What the tokens since the last call add; with `last`, whatever is left."""
        before = self._texts.decode(ids[self._from : self._said])
        now = self._texts.decode(ids[self._from :])
        if len(now) <= len(before) or (now.endswith(BROKEN) and not last):
            return ""
        self._from = self._said
        self._said = len(ids)
        return now[len(before) :]


def check_text(what: str, given: object) -> None:
    """ValueError for what is no text that UTF-8 can hold."""
    if not isinstance(given, str) or any("\ud800" <= c <= "\udfff" for c in given):
        raise ValueError(f"{what} must be text in valid UTF-8, not {given!r:.40}")


def is_chat(given: object) -> bool:
    """Whether it is a list of messages."""
    return isinstance(given, list | tuple) and bool(given) and isinstance(given[0], Mapping) and "role" in given[0]


def read_tokenizer(folder: Path) -> Tokenizer:
    """The checkpoint's tokenizer.json. ValueError if there is none or it can't be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, so a prompt can't be turned into tokens")
    check_size(path, TOKENIZER_BYTES)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} can't be read ({clipped(str(error))})") from error
