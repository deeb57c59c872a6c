"""The aligned ops: nothing outside this folder makes a number."""

from zoo.common.ops.attention import attention
from zoo.common.ops.biased_route import biased_route
from zoo.common.ops.causal_conv import causal_conv
from zoo.common.ops.code_round import FP4_INDEX, FP8_ROWS, Grid, code_round
from zoo.common.ops.combine import combine
from zoo.common.ops.compress import compress
from zoo.common.ops.compressed_attention import compressed_attention
from zoo.common.ops.compressed_select import compressed_select
from zoo.common.ops.contract import CONTRACTS, Contract, Provider, watch
from zoo.common.ops.delta_gate import delta_gate
from zoo.common.ops.embed import embed
from zoo.common.ops.experts import experts
from zoo.common.ops.fp8_experts import fp8_experts
from zoo.common.ops.fp8_linear import fp8_linear
from zoo.common.ops.fp8_quantise import FP32_SCALES, POWERS_OF_TWO, Codes, ScaleRule, fp8_quantise
from zoo.common.ops.fp8_select import fp8_select
from zoo.common.ops.gated_delta import gated_delta, gated_delta_states
from zoo.common.ops.gated_rms_norm import gated_rms_norm
from zoo.common.ops.hadamard import hadamard
from zoo.common.ops.hash_route import hash_route
from zoo.common.ops.head_linear import head_linear
from zoo.common.ops.hyper_head import hyper_head
from zoo.common.ops.hyper_post import hyper_post
from zoo.common.ops.hyper_pre import Sinkhorn, hyper_pre
from zoo.common.ops.l2_norm import l2_norm
from zoo.common.ops.layer_norm import layer_norm
from zoo.common.ops.linear import linear
from zoo.common.ops.log_prob import TokenScores, log_prob, log_prob_of_logits, logits
from zoo.common.ops.log_prob.top import every_log_prob, named_log_prob, top_log_prob, top_of_logits
from zoo.common.ops.norm_rope import norm_rope
from zoo.common.ops.output_gate import output_gate
from zoo.common.ops.packed_experts import packed_experts
from zoo.common.ops.rms_norm import add_rms_norm, rms_norm
from zoo.common.ops.rope import rope, table_hash
from zoo.common.ops.rope.table import Yarn, rope_table, yarn_table
from zoo.common.ops.route import route
from zoo.common.ops.sample import Drawn, sample, score_filtered, support
from zoo.common.ops.select import select
from zoo.common.ops.softplus_route import softplus_route
from zoo.common.ops.sparse_attention import sparse_attention
from zoo.common.ops.swiglu import swiglu
from zoo.common.ops.tail_rope import tail_rope

__all__ = [
    "CONTRACTS",
    "FP4_INDEX",
    "FP8_ROWS",
    "FP32_SCALES",
    "POWERS_OF_TWO",
    "Codes",
    "Contract",
    "Drawn",
    "Grid",
    "Provider",
    "ScaleRule",
    "Sinkhorn",
    "TokenScores",
    "Yarn",
    "add_rms_norm",
    "attention",
    "biased_route",
    "causal_conv",
    "code_round",
    "combine",
    "compress",
    "compressed_attention",
    "compressed_select",
    "delta_gate",
    "embed",
    "every_log_prob",
    "experts",
    "fp8_experts",
    "fp8_linear",
    "fp8_quantise",
    "fp8_select",
    "gated_delta",
    "gated_delta_states",
    "gated_rms_norm",
    "hadamard",
    "hash_route",
    "head_linear",
    "hyper_head",
    "hyper_post",
    "hyper_pre",
    "l2_norm",
    "layer_norm",
    "linear",
    "log_prob",
    "log_prob_of_logits",
    "logits",
    "named_log_prob",
    "norm_rope",
    "output_gate",
    "packed_experts",
    "rms_norm",
    "rope",
    "rope_table",
    "route",
    "sample",
    "score_filtered",
    "select",
    "softplus_route",
    "sparse_attention",
    "support",
    "swiglu",
    "table_hash",
    "tail_rope",
    "top_log_prob",
    "top_of_logits",
    "watch",
    "yarn_table",
]
