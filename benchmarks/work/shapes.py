"""The published models' shapes, by model."""

from __future__ import annotations

from zoo.common.ops.biased_route import Choice

PREFILL = 257  # rows from which attention and gated_delta mean one long document, not one row of each sequence
SHORT = 512  # tokens of each of the documents that gated_delta takes as well
# per model: name -> (N, K, FP32 out)
LINEARS = {
    "qwen3-8b": {
        "qkv": (6144, 4096, False),
        "o": (4096, 4096, False),
        "gate_up": (24576, 4096, False),
        "down": (4096, 12288, False),
        "head": (151936, 4096, True),
        "head chunk": (16384, 4096, True),
    },
    "qwen3-30b-a3b": {"qkv": (5120, 2048, False), "o": (2048, 4096, False), "router": (128, 2048, True)},
    "qwen3.5-35b-a3b": {
        "qkvzba": (12352, 2048, False),
        "qkv": (9216, 2048, False),
        "out": (2048, 4096, False),
        "shared gate_up": (1024, 2048, False),
        "shared down": (2048, 512, False),
        "router": (256, 2048, True),
        "shared gate": (1, 2048, True),
    },
    "qwen3.5-4b": {"qkvzba": (12352, 2560, False), "gate_up": (18432, 2560, False), "down": (2560, 9216, False)},
    "glm-5.2": {
        "latents": (2624, 6144, False),
        "queries": (16384, 2048, False),
        "out": (6144, 16384, False),
        "gate_up": (24576, 6144, False),
        "down": (6144, 12288, False),
        "shared gate_up": (4096, 6144, False),
        "shared down": (6144, 2048, False),
        "router": (256, 6144, True),
        "index queries": (4096, 2048, False),
        "index keys": (160, 6144, False),
    },
}
WIDTHS = {"qwen3-8b": 4096, "qwen3-30b-a3b": 2048, "qwen3.5-4b": 2560}
HEADS = {"qwen3-8b": (32, 8, 128), "qwen3-30b-a3b": (32, 4, 128), "qwen3.5-35b-a3b": (16, 2, 256)}
INTERMEDIATES = {"qwen3-8b": 12288, "qwen3.5-4b": 9216}
# X, D, F, K
MIXTURES = {"qwen3-30b-a3b": (128, 2048, 768, 8), "qwen3.5-35b-a3b": (256, 2048, 512, 8), "glm-5.2": (256, 6144, 2048, 8)}
# the same with experts of four bits, and the limit that gate and up are cut to
PACKED_MIXTURES = {"deepseek-v4-flash": (256, 4096, 2048, 6, 10.0)}
BIASED = {"glm-5.2": Choice(8, scale=2.5)}  # mixtures that biased_route fills; route the others
HEADS_OF_VOCABULARY = {"qwen3-8b": (151936, 4096), "qwen3-30b-a3b": (151936, 2048)}
DELTA = {"qwen3.5-35b-a3b": (16, 32, 128, 128)}
# H, N, K
HEAD_LINEARS = {"glm-5.2": {"queries to latents": (64, 512, 192), "latents to values": (64, 256, 512)}}
INDEX = {"glm-5.2": (32, 128, 2048)}  # heads, width, top K
LATENT = {"glm-5.2": (64, 576, 512, 2048, 256)}  # heads, width, values, top K, the width that scores are scaled by
CONTEXTS = (600, 4096)
