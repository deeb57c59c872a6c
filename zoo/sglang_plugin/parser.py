"""SGLang's registry of config parsers: how a hybrid checkpoint looks to a server that was started with the zoo's backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.common.ends import read_generation
from zoo.common.hub import locate, read_config
from zoo.sglang_plugin.names import PARSER
from zoo.sglang_plugin.states import served_fields


def register_parser() -> None:
    """`--model-config-parser zoo`; nobody's default, implied for hybrid models only."""
    from sglang.srt.configs.model_config_parser_registry import ModelConfigParserBase, register_model_config_parser
    from transformers import PretrainedConfig

    class HybridParser(ModelConfigParserBase):  # type: ignore[misc]
        """A plain configuration: SGLang's own class for these models would switch on its pools for recurrent layers."""

        def parse(self, model: str | Path, trust_remote_code: bool, revision: str | None = None, **kwargs: Any) -> Any:
            fields = read_config(model, revision)
            generation = read_generation(locate(model, revision))
            return PretrainedConfig(**served_fields(fields, generation))

    register_model_config_parser(PARSER)(HybridParser)
