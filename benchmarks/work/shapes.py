"""The published models' shapes, by model."""

from __future__ import annotations

PREFILL = 257  # rows from which attention and gated_delta mean one long document, not one row of each sequence
SHORT = 512  # tokens of each of the documents that gated_delta takes as well
# per model: name -> (N, K, FP32 out)
LINEARS = {
    "qwen3-8b": {
        "qkv": (6144, 4096, False), "o": (4096, 4096, False), "gate_up": (24576, 4096, False), "down": (4096, 12288, False),
        "head": (151936, 4096, True), "head chunk": (16384, 4096, True),
    },
    "qwen3-30b-a3b": {"qkv": (5120, 2048, False), "o": (2048, 4096, False), "router": (128, 2048, True)},
    "qwen3.5-35b-a3b": {
        "qkvzba": (12352, 2048, False), "qkv": (9216, 2048, False), "out": (2048, 4096, False),
        "shared gate_up": (1024, 2048, False),
        "shared down": (2048, 512, False), "router": (256, 2048, True), "shared gate": (1, 2048, True),
    },
    "qwen3.5-4b": {"qkvzba": (12352, 2560, False), "gate_up": (18432, 2560, False), "down": (2560, 9216, False)},
}  # fmt: skip
WIDTHS = {"qwen3-8b": 4096, "qwen3-30b-a3b": 2048, "qwen3.5-4b": 2560}
HEADS = {"qwen3-8b": (32, 8, 128), "qwen3-30b-a3b": (32, 4, 128), "qwen3.5-35b-a3b": (16, 2, 256)}
INNER = {"qwen3-8b": 12288, "qwen3.5-4b": 9216}
# X, D, F, K
MIXTURES = {"qwen3-30b-a3b": (128, 2048, 768, 8), "qwen3.5-35b-a3b": (256, 2048, 512, 8)}
HEADS_OF_VOCABULARY = {"qwen3-8b": (151936, 4096), "qwen3-30b-a3b": (151936, 2048)}
DELTA = {"qwen3.5-35b-a3b": (16, 32, 128, 128)}
CONTEXTS = (600, 4096)
