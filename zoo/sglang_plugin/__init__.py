"""The zoo inside a stock SGLang, through its plugin entry point: one option, `--attention-backend zoo`.

`register` is the entry point. It adds choices and hooks; each hook returns at once unless the server was started with one of
`PROGRAMS`, so an installed plugin changes nothing for other servers. For clients: `Server`, `fingerprint`, `record`,
`routing`, `updating`.
"""

from __future__ import annotations

from zoo.sglang_plugin.client import fingerprint, record, routing, updating
from zoo.sglang_plugin.names import FILTERED, PROGRAMS, REQUEST, ROUTING_WEIGHTS, WEIGHTS
from zoo.sglang_plugin.register import register
from zoo.sglang_plugin.server import Server

__all__ = [
    "FILTERED",
    "PROGRAMS",
    "REQUEST",
    "ROUTING_WEIGHTS",
    "WEIGHTS",
    "Server",
    "fingerprint",
    "record",
    "register",
    "routing",
    "updating",
]
