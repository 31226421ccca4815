"""Tiny upstream releases, a loopback package index that can misbehave, and a checkout that carries a series
on them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_series import cli, fetch, importer
from vllm_series.git import Git
from vllm_series.pins import load_pin
from vllm_series.workspace import Workspace

COMMIT = "a1b2c3d4e"
ENVS = """import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    VLLM_PORT: int = 1

environment_variables = {
    "VLLM_PORT": lambda: int(os.environ.get("VLLM_PORT", "1")),
}


def compile_factors():
    ignored = {
        "VLLM_PORT",
    }
    return ignored


class Config:
    size = 1

    def forward(self, x):
        y = x + 1
        return y

    def backward(self, x):
        y = x - 1
        return y
"""
REGISTRY = """_MODELS = {
    "OldForCausalLM": ("old", "OldForCausalLM"),
    "DeepseekV32ForCausalLM": (
        "vllm.models.deepseek_v32",
        "DeepseekV32ForCausalLM",
    ),
}
"""
FILES: dict[str, str] = {
    "PKG-INFO": "Metadata-Version: 2.4\n",
    "setup.cfg": "[egg_info]\n",
    "vllm.egg-info/SOURCES.txt": "x\n",
    "vllm/_version.py": f"__commit_id__ = commit_id = 'g{COMMIT}'\n",
    "README.md": "# upstream\n",
    ".gitignore": "*.so\nbuild/\nignored/\n",
    "requirements/cuda.txt": "numba\ntorch==2.14.0\n",
    "cmake/external_projects/deepgemm.cmake": (
        'set(_DEEPGEMM_UPSTREAM_REPO "https://github.com/some/DeepGEMM.git")\n'
        'set(_DEEPGEMM_UPSTREAM_TAG "0820030756945b2daec208e8e8255268360f337d")\n'
    ),
    "vllm/__init__.py": "",
    "vllm/envs.py": ENVS,
    "vllm/crlf.txt": "one\r\ntwo\r\n",
    "vllm/model_executor/models/registry.py": REGISTRY,
    "vllm/model_executor/models/old.py": "class OldForCausalLM:\n    pass\n",
    "vllm/models/deepseek_v32/__init__.py": "from .attention import Attention\n",
    "vllm/models/deepseek_v32/attention.py": (
        "from vllm.layers import topk\n\n\n"
        "class Attention:\n    def forward(self, q):\n        return topk(q)\n"
    ),
    "vllm/layers.py": "def topk(q):\n    return q\n",
    "vllm/configs/E=1,N=2.json": "{}\n",
}
SCRIPTS = {"setup.sh": "#!/bin/sh\n"}
TRAILERS = """Feature: core
Origin: none [written for a test]
Upstream-Status: Inappropriate [test]
Anchor: vllm/envs.py::Config.forward
Drop-When: never
Live-When: always"""
MESSAGE = f"Change forward\n\nBecause the test says so.\n\n{TRAILERS}\n"


def message(subject: str, anchor: str = "vllm/envs.py::Config.backward") -> str:
    return MESSAGE.replace("Change forward", subject).replace("vllm/envs.py::Config.forward", anchor)


def make_sdist(
    folder: Path,
    version: str = "0.9.0",
    files: dict[str, str] | None = None,
    *,
    extra: list[tarfile.TarInfo] | None = None,
) -> Path:
    """Write ``vllm-<version>.tar.gz`` with the bytes of ``files`` and members without content from
    ``extra``."""
    top, raw = f"vllm-{version}", io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for mode, group in ((0o664, files or FILES), (0o775, SCRIPTS)):
            for name, text in group.items():
                info = tarfile.TarInfo(f"{top}/{name}")
                info.mode, info.size = mode, len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        for info in extra or []:
            tar.addfile(info)
    path = folder / f"{top}.tar.gz"
    path.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return path


def make_wheel(
    folder: Path, version: str = "0.9.0", platform: str = "x86_64", files: dict[str, str] | None = None
) -> Path:
    path = folder / f"vllm-{version}-cp38-abi3-manylinux_2_28_{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files or FILES).items():
            if name.startswith("vllm/"):
                archive.writestr(name, text)
        archive.writestr("vllm/_C.abi3.so", b"\0ELF")
    return path


def artifact_toml(path: Path) -> str:
    data = path.read_bytes()
    return f'filename = "{path.name}"\nsha256 = "{hashlib.sha256(data).hexdigest()}"\nsize = {len(data)}\n'


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Project:
    """A checkout with one line; ``files`` is the folder in which upstream's files can be had."""

    root: Path
    files: Path
    line: str = "0.9.0"

    @property
    def ws(self) -> Workspace:
        return Workspace(self.root)

    @property
    def tree(self) -> Path:
        return self.root / "build" / self.line

    @property
    def patches(self) -> Path:
        return self.root / "patches" / self.line

    def pin(self) -> Any:
        return load_pin(self.ws, self.line)

    def write_pin(
        self, sdist: Path, *, commit: str = COMMIT, tree: str = "", wheels: dict[str, Path] | None = None
    ) -> None:
        rows = [
            f'schema = 1\nline = "{self.line}"\nrole = "current"\ndsa = 1\n',
            f'[source]\nversion = "{self.line}"',
            f'commit = "{commit}"\ntree = "{tree}"\n[source.sdist]\n{artifact_toml(sdist)}',
            *(f'[[wheel]]\nplatform = "{p}"\n{artifact_toml(w)}' for p, w in (wheels or {}).items()),
            '[torch]\nversion = "2.14.0"\n\n[deepgemm]\nrepository = "some/DeepGEMM"\ncommit = "0820030756"',
        ]
        (self.root / "pins" / f"{self.line}.toml").write_text("\n".join(rows) + "\n")

    def series(self, *args: str, code: int | None = 0) -> Result:
        """Run a command in this process; ``code`` is the exit code that the test expects (None: any)."""
        out, err = io.StringIO(), io.StringIO()
        got = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main(["--root", str(self.root), *args])
            except SystemExit as end:
                got = end.code if isinstance(end.code, int) else 0
        result = Result(got, out.getvalue(), err.getvalue())
        assert code is None or got == code, f"{args}: exit {got}, expected {code}\n{result.out}\n{result.err}"
        return result

    def lock_import(self) -> None:
        """Write the tree id of the import into the pin."""
        tree = importer.odb(self.ws).tree_of(importer.import_pin(self.ws, self.pin()))
        path = self.root / "pins" / f"{self.line}.toml"
        path.write_text(path.read_text().replace('tree = ""', f'tree = "{tree}"'))

    def fetch(self) -> None:
        self.series("fetch", self.line, "--source", str(self.files))

    def apply(self) -> None:
        self.series("apply", self.line)

    def state(self) -> str:
        found = self.series("status", self.line, "--json").json
        return str(found["lines"][self.line]["state"])

    def git(self, *args: str) -> str:
        """Run git in the tree as a user does: with his environment and config."""
        own = {
            "GIT_AUTHOR_NAME": "U",
            "GIT_AUTHOR_EMAIL": "u@x",
            "GIT_COMMITTER_NAME": "U",
            "GIT_COMMITTER_EMAIL": "u@x",
        }
        done = subprocess.run(
            ["git", "-C", str(self.tree), *args],
            capture_output=True,
            text=True,
            env={**os.environ, **own},
            check=False,
        )
        assert done.returncode == 0, f"git {args}: {done.stderr}"
        return done.stdout.strip()

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.tree / path
        text = file.read_bytes().decode()
        assert old in text
        file.write_bytes(text.replace(old, new, 1).encode())

    def commit(self, message: str = MESSAGE, *args: str) -> str:
        self.git("add", "-A")
        self.git("-c", "commit.gpgsign=false", "commit", "-q", "--no-verify", "-m", message, *args)
        return self.git("rev-parse", "HEAD")

    def first_patch(self) -> None:
        """Apply, change ``Config.forward`` in a commit, and export it as change-forward.patch."""
        self.apply()
        self.edit("vllm/envs.py", "        y = x + 1\n", "        y = x + 2\n        y = y + 0\n")
        self.commit()
        self.series("export", self.line)

    def second_patch(self) -> None:
        """Change ``Config.backward`` in a commit on top, and export it as change-backward.patch."""
        self.edit("vllm/envs.py", "        y = x - 1\n", "        y = x - 2\n")
        self.commit(message("Change backward"))
        self.series("export", self.line)

    def snapshot(self) -> dict[str, bytes]:
        """Return all bytes under patches/ and overlay/."""
        return {
            str(p.relative_to(self.root)): p.read_bytes()
            for top in ("patches", "overlay")
            for p in sorted((self.root / top).rglob("*"))
            if p.is_file()
        }

    def head_tree(self) -> str:
        return Git(self.tree).tree_of("HEAD")


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no user config, an own cache."""
    for name in list(os.environ):
        if name.startswith("GIT_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("VLLM_SERIES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_SERIES_INDEX", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setattr(fetch, "PAUSE", 0.01)


def _new_checkout(folder: Path) -> Project:
    root, files = folder / "checkout", folder / "files"
    for made in (root / "pins", root / "patches" / "0.9.0", root / "overlay" / "vllm" / "dsa", files):
        made.mkdir(parents=True)
    project = Project(root, files)
    (project.patches / "series").write_text("# Patches of the test line.\n")
    (root / "overlay/vllm/dsa/__init__.py").write_text("NAME = 'dsa'\n")
    project.write_pin(make_sdist(files))
    return project


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkouts in three stages, made once and copied for each test."""
    top = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERIES_CACHE", str(top / "0" / "cache"))
        project = _new_checkout(top / "0")
        project.fetch()
        project.lock_import()
        project.series("lock")
        for stage, work in (("1", project.first_patch), ("2", project.second_patch)):
            shutil.copytree(top / "0", top / f"{stage}.tmp", symlinks=True)
            (top / f"{stage}.tmp").rename(top / f"before-{stage}")
            work()
        shutil.copytree(top / "0", top / "two", symlinks=True)
    return top


def _copy(template: Path, folder: Path) -> Project:
    for name in ("checkout", "files", "cache"):
        shutil.copytree(template / name, folder / name, symlinks=True)
    return Project(folder / "checkout", folder / "files")


@pytest.fixture
def bare(tmp_path: Path) -> Project:
    """A checkout whose pin is there, with nothing fetched yet."""
    return _new_checkout(tmp_path)


@pytest.fixture
def project(tmp_path: Path, templates: Path) -> Project:
    """A checkout that is fetched, imported and locked, with no patches."""
    return _copy(templates / "before-1", tmp_path)


@pytest.fixture
def patched(tmp_path: Path, templates: Path) -> Project:
    """A checkout with one patch, applied."""
    return _copy(templates / "before-2", tmp_path)


@pytest.fixture
def two(tmp_path: Path, templates: Path) -> Project:
    """A checkout with two patches on the same file, applied."""
    return _copy(templates / "two", tmp_path)


@dataclass
class Index:
    """A package index on the loopback device. ``cut``: bytes after which the connection is closed."""

    url: str
    folder: Path
    cut: int | None = None
    cut_once: bool = True
    ranges: bool = True
    status: int = 200
    html: bool = False
    tell_hash: bool = True
    yanked: set[str] = field(default_factory=set)
    replaced: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)


@pytest.fixture
def index(bare: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Serve ``bare.files`` as a package index."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made = Index(f"http://127.0.0.1:{server.server_address[1]}/simple", bare.files)
    handler.index = made  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("VLLM_SERIES_INDEX", made.url)
    yield made
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    index: Index
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self.index.requests.append((self.path, self.headers.get("Range", "")))
        if self.index.status != 200:
            self._send(b"no", "text/plain", self.index.status)
        elif self.path == "/simple/vllm/":
            self._page()
        else:
            self._file(self.path.rsplit("/", 1)[-1].replace("%2C", ","))

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _page(self) -> None:
        rows = []
        for path in sorted(self.index.folder.iterdir()):
            sha = hashlib.sha256(path.read_bytes()).hexdigest()
            row: dict[str, Any] = {
                "filename": path.name,
                "url": f"../../files/{path.name}",
                "size": path.stat().st_size,
            }
            row["hashes"] = {"sha256": sha} if self.index.tell_hash else {}
            row["yanked"] = "broken" if path.name in self.index.yanked else False
            rows.append(row)
        if self.index.html:
            links = "".join(
                f'<a href="{row["url"]}#sha256={row["hashes"]["sha256"]}">{row["filename"]}</a>'
                for row in rows
            )
            self._send(f"<html><body>{links}</body></html>".encode(), "text/html")
        else:
            self._send(json.dumps({"files": rows}).encode(), "application/vnd.pypi.simple.v1+json")

    def _file(self, name: str) -> None:
        path = self.index.folder / name
        if not path.is_file():
            self._send(b"no", "text/plain", 404)
            return
        data, start = self.index.replaced.get(name, path.read_bytes()), 0
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if found and self.index.ranges:
            start = int(found[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = len(data)
        if self.index.cut is not None:
            end = min(len(data), start + self.index.cut)
            if self.index.cut_once:
                self.index.cut = None
        self.wfile.write(data[start:end])
        self.close_connection = end < len(data)


def die_in_child(work: Callable[[Callable[[], None]], None]) -> int:
    """Run ``work`` in a forked child and return its wait status; ``work`` gets a function that kills the
    child."""
    pid = os.fork()
    if pid == 0:
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
            work(lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def real_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow test use the machine's cache of real downloads and the real index."""
    shared = os.environ.get("VLLM_SERIES_TEST_CACHE") or _shared_cache
    monkeypatch.setenv("VLLM_SERIES_CACHE", shared)
    monkeypatch.setenv("VLLM_SERIES_INDEX", "https://pypi.org/simple")
    for name, value in _proxies.items():
        monkeypatch.setenv(name, value)


_shared_cache = str(Workspace(Path.cwd()).cache)
_proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture
def real(tmp_path: Path, checkout: Path, real_cache: None) -> Workspace:
    """A copy of this checkout's pins, patches and overlay, sharing nothing else."""
    root = tmp_path / "real"
    for name in ("pins", "patches", "overlay"):
        shutil.copytree(checkout / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return Workspace(root)
