"""Names that servers, clients and tests share."""

from __future__ import annotations

# value of --attention-backend -> program of the zoo
PROGRAMS = {"zoo": "aligned", "zoo_unaligned": "unaligned"}
# SGLang's versions whose bytes were compared with the trainer's on a GPU; others start with a warning
PROVEN = ("0.5.17",)
SAMPLER = "zoo"
# meta_info key of the log-probabilities after top-k, top-p and min-p too, one per output token
FILTERED = "output_token_filtered_logprobs"
# meta_info key, per output token the weights (first digits of the content hash) that drew it and wrote every row that it stands on;
# None where there are none such. One entry for an answer without output tokens, whose prompt was scored
WEIGHTS = "output_token_weights"
WEIGHTS_DIGITS = 8
# meta_info key whose last entry says what a finished answer is to: {"prompt": digest of its token ids, "seed": the one that drew}
REQUEST = "answered_request"
# key of a captured draw on its way from the forward to the sampler; it never leaves the scheduler
DRAWN = "drawn"
# meta_info key of the weights of SGLang's `routed_experts`; the last entry has all of a request's
ROUTING_WEIGHTS = "routing_weights"
# internal-state key that holds the fingerprint
STATE = "zoo"
# config.json's model_type of the families that this plugin serves
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
# those with state in slots, which SGLang must see as plain attention models: parser and architecture of that view
HYBRID = FAMILIES[2:]
PARSER = "zoo"
HYBRID_ARCHITECTURE = "ZooHybridForCausalLM"
