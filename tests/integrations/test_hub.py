"""Hub ids through huggingface_hub, against a loopback server with the hub's routes. No network is touched."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from weights_tools.make_tiny import make_tiny
from zoo.common.shards import INDEX

REPO = "lab/tiny-qwen3"
COMMIT = "c0ffee" + "0" * 34
OLD = "0badbeef" + "0" * 32
PROGRAM = """
import sys, zoo
kwargs = {"revision": sys.argv[3]} if sys.argv[3] else {}
try:
    print("version", zoo.load(sys.argv[1], role=sys.argv[2], device="cpu", **kwargs).weights_version)
except ValueError as error:
    print("refused", error)
"""


@dataclass
class Hub:
    """Serves folders as revisions of one repository; `asked` lists the requests."""

    revisions: dict[str, tuple[str, Path]]
    asked: list[str] = field(default_factory=list)
    gated: bool = False
    broken: bool = False
    url: str = ""


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        if self.hub.broken:
            return self.answer(503, b"down")
        if repo != REPO:
            return self.fail(401 if api else 404, "RepoNotFound", "Repository not found")
        if self.hub.gated:
            return self.fail(403, "GatedRepo", "Access to this repository is restricted")
        revision = parts[5 if api else 3]
        if revision not in self.hub.revisions:
            return self.fail(404, "RevisionNotFound", "Invalid rev id")
        commit, folder = self.hub.revisions[revision]
        names = sorted(p.name for p in folder.iterdir())
        if api and parts[4] == "revision":
            body = {
                "id": REPO,
                "modelId": REPO,
                "sha": commit,
                "private": False,
                "tags": [],
                "siblings": [{"rfilename": n} for n in names],
            }
            return self.answer(200, json.dumps(body).encode(), {"X-Repo-Commit": commit})
        if api:
            entries = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": etag(folder / n)} for n in names]
            return self.answer(200, json.dumps(entries).encode(), {"X-Repo-Commit": commit})
        name = "/".join(parts[4:])
        if name not in names:
            return self.fail(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        content = (folder / name).read_bytes()
        size = str(len(content))
        self.answer(
            200,
            content,
            {"ETag": f'"{etag(folder / name)}"', "X-Repo-Commit": commit, "X-Linked-Size": size, "Accept-Ranges": "bytes"},
        )

    def fail(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        self.answer(status, message.encode(), {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Revision main, and the older v1 with other weights."""
    served = make_tiny("qwen3", tmp_path / "main", layers=1, hidden=64)
    older = make_tiny("qwen3", tmp_path / "v1", layers=1, hidden=64, seed=1)
    (served / "README.md").write_text("not needed")
    (served / "pytorch_model.bin").write_text("not wanted")
    state = Hub({"main": (COMMIT, served), COMMIT: (COMMIT, served), "v1": (OLD, older), OLD: (OLD, older)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Routes,), {"hub": state}))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """Of a fresh process: huggingface_hub reads its endpoint once, when it is imported."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    return clean | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.getcwd()}


def load(
    endpoint: str, home: Path, repo: str = REPO, revision: str = "", role: str = "rl", offline: bool = False, folder: Path | None = None
) -> str:
    """What a fresh process prints."""
    env = environment(endpoint, home) | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, repo, role, revision], env=env, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def local(folder: Path) -> str:
    import zoo

    return f"version {zoo.load(folder, device='cpu').weights_version}"


def test_load_by_hub_id_then_offline(hub: Hub, tmp_path: Path) -> None:
    served = hub.revisions["main"][1]
    older = hub.revisions["v1"][1]
    assert local(served) != local(older)
    assert load(hub.url, tmp_path / "home") == local(served)
    fetched = [line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET") and "/resolve/" in line]
    assert INDEX in fetched and "tokenizer.json" in fetched and not {"README.md", "pytorch_model.bin"} & set(fetched)
    assert load(hub.url, tmp_path / "home", revision="v1", role="serving") == local(older)
    hub.asked.clear()
    assert load(hub.url, tmp_path / "home", offline=True) == local(served)
    assert hub.asked == []


def test_a_mistyped_folder_is_refused_before_the_hub_is_asked(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    here = tmp_path / "here"
    (here / "lab").mkdir(parents=True)
    said = f"refused {REPO} is not a folder, though lab is here; give a revision (main) if the hub's {REPO} is meant"
    assert load(hub.url, home, folder=here) == said and hub.asked == []
    wanted = local(hub.revisions["main"][1])
    assert load(hub.url, home, revision="main", folder=here) == wanted and hub.asked  # the controls: it is said which is meant,
    assert load(hub.url, home, folder=here) == wanted  # it was downloaded before,
    assert load(hub.url, tmp_path / "other", folder=tmp_path) == wanted  # there is no such folder


def test_what_the_hub_has_not_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert load(hub.url, home, repo="lab/absent").startswith(f"refused 'lab/absent', revision 'main', at {hub.url}: no such repository")
    assert load(hub.url, home, revision="v9") == f"refused '{REPO}', revision 'v9', at {hub.url}: the repository has no such revision"
    hub.broken = True
    assert "the hub can't be reached" in load(hub.url, home)
    hub.broken = False
    hub.gated = True
    assert load(hub.url, home).startswith(f"refused '{REPO}', revision 'main', at {hub.url}: the repository is gated")


@pytest.mark.parametrize("login", ["", "name:pass%20word@", "name:p@ss@"])
def test_a_login_in_the_endpoint_is_in_no_error(hub: Hub, tmp_path: Path, login: str) -> None:
    url = hub.url.replace("://", f"://{login}")
    hub.gated = True
    said = [load(url, tmp_path / "home"), load(url, tmp_path / "home", repo="lab/absent")]
    hub.broken = True
    said += [load(url, tmp_path / "home"), load(url.replace("http:", "ftp:"), tmp_path / "home")]
    assert all(line.startswith("refused ") and "pass" not in line and "p@ss" not in line and "name:" not in line for line in said)
    assert said[0].startswith(f"refused '{REPO}', revision 'main', at {hub.url}: ")


def test_the_command_lines_take_a_revision(hub: Hub, tmp_path: Path) -> None:
    """Each revision has other weights: a command that reads another one than it was asked for is seen."""
    served, older = (str(hub.revisions[name][1]) for name in ("main", "v1"))

    def status(*arguments: str) -> int:
        env = environment(hub.url, tmp_path / "home")
        return subprocess.run([sys.executable, "-m", *arguments], env=env, cwd=tmp_path, capture_output=True).returncode

    assert status("weights_tools", "compare", REPO, older, "--revision", "v1") == 0
    assert status("weights_tools", "compare", older, REPO, "--revision", "v1") == 0
    assert status("weights_tools", "compare", older, REPO) == 1
    assert status("weights_tools", "compare", REPO, REPO, "--revision", "v1", "--revision-b", "main") == 1
    assert status("weights_tools", "compare", older, served, "--revision", "v1") == 2  # two folders
    climbed = ("verify", "qwen3", "--device", "cpu", "--rungs", "1", "--lengths", "9", "--checkpoint", REPO, "--json", "out.json")
    assert status("zoo", *climbed, "--revision", "v1") == 0
    fingerprint = json.loads((tmp_path / "out.json").read_text())["fingerprint"]
    assert f"version {fingerprint['weights']}" == local(Path(older))


def test_unreachable_and_offline_are_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        text = load(url, tmp_path / "home")
        absent = f"refused '{REPO}', revision 'main', at {url}: not in the local cache (or only partly)"
        assert text == f"{absent}, the hub can't be reached, and there is no local folder of that name"
        text = load(url, tmp_path / "home", offline=True)
        assert text == f"{absent}, HF_HUB_OFFLINE is set, and there is no local folder of that name"


def test_shard_that_the_hub_lost(hub: Hub, tmp_path: Path) -> None:
    (hub.revisions["main"][1] / "model-00002-of-00004.safetensors").unlink()
    assert "names 1 absent files: model-00002-of-00004.safetensors" in load(hub.url, tmp_path / "home")
