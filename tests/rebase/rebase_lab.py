"""A small upstream with several releases, an index that serves them, and a checkout of the series on one of
them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_series import cli, export, series
from vllm_series.git import Git

INDEXER = '''\
"""Scores and selects."""

import os


def score(q, k):
    """Dot product."""
    total = 0
    for a, b in zip(q, k):
        total += a * b
    return total


def select(scores, k):
    """The k largest."""
    order = sorted(scores)
    best = order[-k:]
    best.reverse()
    return best


def fast(scores, k):
    """The k largest, another way."""
    heap = list(scores)
    heap.sort()
    return heap[-k:]


LIMIT = 8
'''
MLA = '''\
"""The layer."""

from vllm.layers.indexer import select


class Layer:
    """Attention."""

    def forward(self, x):
        scores = [1, 2, 3]
        chosen = select(scores, 2)
        return [x[i] for i in chosen]
'''
REGISTRY = '''\
"""Which model is which."""

_MODELS = {
    "DeepseekV32ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
}
'''
FILES: dict[str, str] = {
    "vllm/__init__.py": "",
    "vllm/layers/__init__.py": "",
    "vllm/layers/indexer.py": INDEXER,
    "vllm/layers/mla.py": MLA,
    "vllm/model_executor/models/registry.py": REGISTRY,
    "vllm/model_executor/models/deepseek_v2.py": "from vllm.layers.mla import Layer\n",
    "vllm/models/deepseek_v32/__init__.py": "Layer = object\n",
    "requirements/cuda.txt": "torch==2.13.0\n",
    "cmake/external_projects/deepgemm.cmake": (
        'GIT_REPOSITORY "https://github.com/a/DeepGEMM.git"\nGIT_TAG "0123456789abcdef0123456789abcdef"\n'
    ),
    "README.md": "upstream\n",
}
LIVE = "registry:DeepseekV32ForCausalLM=vllm.model_executor.models.deepseek_v2"
NEWER = {
    "vllm/model_executor/models/registry.py": REGISTRY.replace(
        '"deepseek_v2", "DeepseekV3ForCausalLM"', '"vllm.models.deepseek_v32", "DeepseekV32ForCausalLM"'
    )
}


def changed(path: str, old: str, new: str, base: Mapping[str, str] = FILES) -> dict[str, str]:
    """Return ``base`` with one replacement, which has to hit exactly once."""
    assert base[path].count(old) == 1, (path, old)
    return {**base, path: base[path].replace(old, new)}


@dataclass
class Index:
    """A package index on this machine; ``log`` holds the requested paths."""

    files: dict[str, bytes] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    url: str = ""

    def page(self) -> bytes:
        rows = [
            {"filename": name, "url": f"{self.url}/files/{name}", "size": len(data),
             "yanked": self.yanked.get(name, False),
             "hashes": {"sha256": hashlib.sha256(data).hexdigest()}}
            for name, data in self.files.items()
        ]  # fmt: skip
        return json.dumps({"meta": {"api-version": "1.1"}, "name": "vllm", "files": rows}).encode()

    def publish(
        self,
        version: str,
        files: Mapping[str, str],
        *,
        wheel: bool = True,
        source: bool = True,
        yanked: str = "",
    ) -> None:
        commit = hashlib.sha1(version.encode()).hexdigest()[:9]
        made = f"__version__ = version = '{version}'\n__commit_id__ = commit_id = 'g{commit}'\n"
        names = []
        if source:
            names.append(f"vllm-{version}.tar.gz")
            everything = {**files, "vllm/_version.py": made, "PKG-INFO": f"Version: {version}\n"}
            self.files[names[-1]] = _archive(f"vllm-{version}", everything)
        if wheel:
            names.append(f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl")
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w") as archive:
                for path, text in {**files, "vllm/_version.py": made}.items():
                    if path.startswith("vllm/"):
                        archive.writestr(zipfile.ZipInfo(path), text)
            self.files[names[-1]] = out.getvalue()
        self.yanked.update(dict.fromkeys(names, yanked) if yanked else {})


def _archive(top: str, files: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def serve(index: Index) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rstrip("/").rsplit("/", 1)[-1]
            data = index.page() if name == "vllm" else index.files.get(name)
            self.send_response(200 if data is not None else 404)
            kind = "application/vnd.pypi.simple.v1+json" if name == "vllm" else "application/octet-stream"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def make_patch(
    files: Mapping[str, str], after: Mapping[str, str], subject: str, anchors: tuple[str, ...], *,
    live: str = "always",
    drop: str = "never", work: Path | None = None,
) -> bytes:  # fmt: skip
    """Return the patch mail that turns ``files`` into ``after``, in the form that the tool exports."""
    with tempfile.TemporaryDirectory(dir=work) as tmp:
        git = Git(Path(tmp))
        git.run("init", "-q")
        for step, tree in (("base", files), ("patch", after)):
            for path in set(files) - set(tree):
                (Path(tmp) / path).unlink(missing_ok=True)
            for path, text in tree.items():
                target = Path(tmp) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
            git.run("add", "-A")
            trailers = "".join(f"Anchor: {one}\n" for one in anchors)
            message = (
                f"{subject}\n\nWhy it is there.\n\nFeature: core\nOrigin: none [a test]\n"
                f"Upstream-Status: Inappropriate [a test]\n{trailers}Drop-When: {drop}\nLive-When: {live}\n"
            )
            git.run("commit", "-q", "-m", message if step == "patch" else "base")
        return git.raw(*export.FORMAT, "HEAD")


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def states(self) -> dict[str, str]:
        return {row["patch"]: row["state"] for row in self.json["patches"]}


@dataclass
class Lab:
    """A checkout of the series. ``run`` calls the command line in this process, ``argv`` is for one of its
    own."""

    root: Path
    index: Index
    env: dict[str, str]
    files: dict[str, str] = field(default_factory=lambda: dict(FILES))

    def run(self, *args: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        saved = dict(os.environ)
        os.environ.clear()
        os.environ.update(self.env)
        code: Any = 0
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.main(["--root", str(self.root), *args])
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            os.environ.clear()
            os.environ.update(saved)
        return Result(int(code), out.getvalue(), err.getvalue())

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "vllm_series.cli", "--root", str(self.root), *args]

    def ok(self, *args: str) -> Result:
        done = self.run(*args)
        assert done.code == 0, (args, done)
        return done

    def line(
        self, version: str, files: Mapping[str, str], patches: Mapping[str, bytes], role: str = "current"
    ) -> None:
        """Make a line: published, pinned, with these patches and its LOCK."""
        self.index.publish(version, files)
        self.ok("pin", "add", version)
        pin = self.root / "pins" / f"{version}.toml"
        pin.write_text(pin.read_text().replace('"candidate"', f'"{role}"'))
        folder = self.root / "patches" / version
        for name, data in patches.items():
            (folder / name).write_bytes(data)
        with (folder / "series").open("a") as out:
            out.writelines(f"# about {name}\n{name}\n" for name in patches)
        self.ok("lock", version)

    def patch(
        self, before: Mapping[str, str], after: Mapping[str, str], subject: str, *anchors: str, **more: str
    ) -> bytes:
        return make_patch(before, after, subject, anchors, **more)  # type: ignore[arg-type]

    def tree(self, new: str) -> Path:
        return self.root / "build" / f"{new}.rebase"

    def snapshot(self, line: str) -> dict[str, bytes]:
        """Return the files of a line as they lie on disk."""
        found = {path.name: path.read_bytes() for path in (self.root / "patches" / line).iterdir()}
        return {**found, "pin": (self.root / "pins" / f"{line}.toml").read_bytes()}

    def parsed(self, line: str, name: str) -> series.Patch:
        return series.parse(name, (self.root / "patches" / line / name).read_bytes())


def new_lab(folder: Path, index: Index) -> Lab:
    root = folder / "checkout"
    for name in ("pins", "patches", "overlay/vllm/dsa"):
        (root / name).mkdir(parents=True)
    (root / "overlay/vllm/dsa/__init__.py").write_text("READY = True\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_SERIES_", "UV_", "PIP_"))}
    env.update(
        VLLM_SERIES_CACHE=str(folder / "cache"), VLLM_SERIES_INDEX=f"{index.url}/simple", NO_PROXY="127.0.0.1"
    )
    return Lab(root, index, env)
