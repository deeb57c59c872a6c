"""The tokens that end a sequence: those of config.json, and those that generation_config.json adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.common.config import check_tokens
from zoo.common.reading import CONFIG_BYTES, parse_object, read_bytes

GENERATION = "generation_config.json"


def end_tokens(config: Any, generation: dict[str, Any] | None) -> tuple[int, ...]:
    """The union of a config's ends, which it reads outside and in text_config, and of generation_config.json's, an integer or a list.

    ValueError for what is no token id of the vocabulary.
    """
    value = None if generation is None else generation.get("eos_token_id")
    more = [] if value is None else value if isinstance(value, list) else [value]
    check_tokens(GENERATION, "eos_token_id", value, more, config.vocabulary)
    return tuple(dict.fromkeys((*config.eos, *more)))


def read_generation(folder: Path) -> dict[str, Any] | None:
    """The fields of a checkpoint's generation_config.json; None where there is none. ValueError if it is not a JSON object."""
    path = folder / GENERATION
    return parse_object(path, read_bytes(path, CONFIG_BYTES)) if path.is_file() else None
