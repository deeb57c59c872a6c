"""Names that servers, clients and tests share."""

from __future__ import annotations

# value of --attention-backend -> program of the zoo
PROGRAMS = {"zoo": "aligned", "zoo_unaligned": "unaligned"}
SAMPLER = "zoo"
# meta_info key of the log-probabilities after top-k, top-p and min-p too, one per output token
FILTERED = "output_token_filtered_logprobs"
# internal-state key that holds the fingerprint
STATE = "zoo"
# config.json's model_type of the families that this plugin serves
FAMILIES = ("qwen3", "qwen3_moe")
