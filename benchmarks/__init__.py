"""Benchmarks: `python -m benchmarks ops|models|sglang`. Rivals run on the same GPU, in the same run, interleaved with ours."""
