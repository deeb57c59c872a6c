"""A stand-in of a stock SGLang with the plugin: HTTP over the embedded engine, answers with SGLang's and the plugin's fields.

It shows that a client's requests, records and updates fit together. That SGLang itself answers so is what tests with SGLang show.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from zoo.common.engine import Engine
from zoo.common.rollouts import Completion
from zoo.common.serving import ForServing
from zoo.sglang_plugin.names import FILTERED, REQUEST, STATE, WEIGHTS, WEIGHTS_DIGITS
from zoo.sglang_plugin.requests import ending, prompt_digest, sampling_params


class StandIn:
    """Answers /server_info, /generate and /update_weights_from_disk. `updates`: whether weights that are pushed are taken."""

    def __init__(self, model: ForServing) -> None:
        self.engine = Engine(model, pages=64, page_size=16)
        self.updates = True
        self.labels: list[Any] = []

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
        """ValueError for what SGLang with the plugin would answer with status 400."""
        if route == "/server_info":
            return {"internal_states": [{STATE: {"fingerprint": self.engine.fingerprint().to_dict()}}]}
        if route == "/generate":
            assert body["return_logprob"] is True
            fields = body["sampling_params"]
            params = [replace(sampling_params(f, seed=n), **ending(f)) for n, f in enumerate(fields)]
            records = self.engine.generate(body["input_ids"], params)
            return [self._said(record) for record in records]
        assert route == "/update_weights_from_disk"
        self.labels.append(body.get("weight_version"))
        if self.updates:
            try:
                self.engine.update_weights(load_file(Path(body["model_path"]) / "model.safetensors").items())
            except ValueError as error:
                return {"success": False, "message": f"the weights were not updated: {error}"}
        return {"success": True, "message": "Succeeded."}

    def _said(self, record: Completion) -> dict[str, Any]:
        count = len(record.output_ids)
        reason: dict[str, Any] = {"type": record.finish_reason}
        reason |= {"matched": record.output_ids[-1]} if record.finish_reason == "stop" else {"length": count}
        seed = record.sampling.seed or 0
        meta = {
            "id": record.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(record.prompt_ids),
            "completion_tokens": count,
            "output_token_logprobs": [[value, token, None] for value, token in zip(record.log_probs, record.output_ids, strict=True)],
            FILTERED: list(record.filtered_log_probs),
            WEIGHTS: [version[:WEIGHTS_DIGITS] for version in record.output_versions],
            REQUEST: [None] * (count - 1) + [{"prompt": prompt_digest(record.prompt_ids), "seed": seed}],
        }
        return {"output_ids": list(record.output_ids), "meta_info": meta}


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Its address while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            try:
                status = 200
                said = json.dumps(stand_in.answer(self.path, body))
            except ValueError as error:
                status = 400
                said = json.dumps({"error": {"message": str(error)}})
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *given: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
