"""Tools for checkpoints: make-tiny, inspect, compare, convert, quantize, dequantize."""
