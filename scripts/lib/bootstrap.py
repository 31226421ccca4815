#!/usr/bin/env python3
"""Make the tool's environment from nothing but Python 3.11 and git, with the standard library alone.

Downloads a pinned uv from the package index, checks its sha256, unpacks it to ``.tools/`` and lets it
install ``uv.lock`` into ``.venv``. A second call notices that nothing changed and returns at once. Safe to
interrupt and to run twice at the same time: downloads are renamed into place, one lock file serialises the
runs, and an environment that was being written when the last run died is made anew. Needs Python 3.11
(``env.sh`` looks for one).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import html
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

try:
    import ssl
except ImportError:  # python3-minimal
    sys.exit("bootstrap: this Python has no ssl module\n  fix: apt-get install python3 ca-certificates")

UV_VERSION = "0.13.9"
#: Machine -> (file name on the index, sha256).
UV_WHEELS = {
    "x86_64": (
        "uv-0.13.9-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
    ),
    "aarch64": (
        "uv-0.13.9-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64.whl",
        "5435c5ce14a56431208ca0996416d310f1598e8c2c8ba707688985a16bb82dbe",
    ),
}
PYPI = "https://pypi.org/simple"
TRIES = 3
TIMEOUT_S = 60


class BootstrapError(Exception):
    """What went wrong, and the step that mends it."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message}\n  fix: {fix}")


def say(text: str) -> None:
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def index_url() -> str:
    """The package index: ``UV_DEFAULT_INDEX``, then ``PIP_INDEX_URL``, then PyPI. No trailing slash."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        value = os.environ.get(name, "").strip()
        if value:
            return value.partition("=")[2].rstrip("/") if re.match(r"^[\w.-]+=", value) else value.rstrip("/")
    return PYPI


def without_credentials(url: str) -> str:
    """The URL as it may be printed."""
    return re.sub(r"//[^/@]*@", "//", url)


def read_url(url: str, accept: str = "*/*") -> tuple[bytes, str]:
    """Return body and content type. Credentials in the URL become a header; failures are tried again."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept, "User-Agent": "vllm-series-bootstrap"}
    if parts.username:
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    shown = parts.geturl()
    for attempt in range(1, TRIES + 1):
        try:
            request = urllib.request.Request(shown, headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                body = reply.read()
                expected = reply.headers.get("Content-Length")
                if expected is not None and int(expected) != len(body):
                    raise OSError(f"{len(body)} of {expected} bytes arrived")
                return body, reply.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == TRIES:
                raise BootstrapError(
                    f"{shown} answered {error.code}",
                    "check the index (UV_DEFAULT_INDEX or PIP_INDEX_URL) and run again",
                ) from error
        except (OSError, ssl.SSLError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise BootstrapError(
                    f"the certificate of {parts.hostname} cannot be checked: {error}",
                    "apt-get install ca-certificates, or set SSL_CERT_FILE to your proxy's certificate",
                ) from error
            if attempt == TRIES:
                raise BootstrapError(
                    f"cannot reach {shown}: {error}",
                    "check the network (https_proxy, UV_DEFAULT_INDEX for a mirror) and run again",
                ) from error
        say(f"{shown}: no answer, trying again ({attempt}/{TRIES})")
        time.sleep(attempt)
    raise AssertionError("unreachable")


def find_file(index: str, project: str, filename: str) -> str:
    """Return the URL under which the index offers ``filename`` (PEP 691 JSON or PEP 503 HTML)."""
    page = f"{index}/{project}/" + ("index.html" if index.startswith("file:") else "")
    body, kind = read_url(page, "application/vnd.pypi.simple.v1+json, text/html;q=0.5")
    if "json" in kind:
        links: list[str] = [item["url"] for item in json.loads(body)["files"]]
    else:
        links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', body.decode())]
    for link in links:
        url = urllib.parse.urljoin(page, link.partition("#")[0])
        if urllib.parse.unquote(url.rpartition("/")[2]) == filename:
            return url
    raise BootstrapError(
        f"{without_credentials(page)} does not offer {filename}",
        "use an index that mirrors PyPI (UV_DEFAULT_INDEX=https://pypi.org/simple)",
    )


def ensure_uv(tools: Path, index: str) -> Path:
    """Return the pinned uv under ``tools``, downloading it when it is not there.

    Raises:
        BootstrapError: unknown machine, no network, not on the index, or the sha256 differs.
    """
    target = tools / f"uv-{UV_VERSION}" / "uv"
    if target.is_file():
        return target
    machine = platform.machine().lower()
    if machine not in UV_WHEELS or sys.platform != "linux":
        raise BootstrapError(
            f"no uv is pinned for {sys.platform} on {machine}",
            "use Linux on x86_64 or aarch64, as vLLM's wheels do",
        )
    filename, sha256 = UV_WHEELS[machine]
    say(f"fetching uv {UV_VERSION} from {urllib.parse.urlsplit(index).hostname or index}")
    body, _ = read_url(find_file(index, "uv", filename))
    found = hashlib.sha256(body).hexdigest()
    if found != sha256:
        raise BootstrapError(
            f"{filename}: sha256 {found}, pinned {sha256}",
            "the index or a proxy changed the file: run again, or use UV_DEFAULT_INDEX=https://pypi.org/simple",
        )
    new = tools / f".uv-{UV_VERSION}.{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    with zipfile.ZipFile(io.BytesIO(body)) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".data/scripts/uv"))
        (new / "uv").write_bytes(wheel.read(member))
    (new / "uv").chmod(0o755)
    shutil.rmtree(target.parent, ignore_errors=True)
    new.rename(target.parent)
    return target


def fingerprint(root: Path) -> str:
    """What the environment depends on: the lock, the project file, uv, and the interpreter."""
    python = Path(sys.executable).resolve()
    digest = hashlib.sha256(f"{UV_VERSION}\n{sys.version}\n{python}\n{root}\n".encode())
    for name in ("uv.lock", "pyproject.toml"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; says so when another run holds it."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is making the environment, waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_uv(uv: Path, root: Path, *args: str) -> None:
    """Run uv in ``root`` on this interpreter; its own error text stays visible."""
    env = dict(os.environ)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT"):
        env.pop(name, None)
    env["UV_PYTHON_DOWNLOADS"] = "never"
    home = env.get("HOME", "")
    if "UV_CACHE_DIR" not in env and not (home and os.access(home, os.W_OK)):
        env["UV_CACHE_DIR"] = str(root / ".tools" / "uv-cache")
    done = subprocess.run([str(uv), *args], cwd=root, env=env, check=False)
    if done.returncode:
        raise BootstrapError(
            f"`uv {' '.join(args)}` failed with {done.returncode} (its message is above)",
            "mend what it names (network, disk space) and run the same command again",
        )


def install(uv: Path, root: Path, index: str) -> None:
    """Install ``uv.lock`` and this project into ``.venv``; hashes bind with every index."""
    python = ("--python", sys.executable)
    if index == PYPI:
        run_uv(uv, root, "sync", "--frozen", "--quiet", *python)
        return
    # uv.lock names PyPI's files by URL; a mirror must serve the same bytes, which the exported hashes prove.
    wanted = root / ".tools" / "requirements.txt"
    run_uv(uv, root, "export", "--frozen", "--quiet", "--no-emit-project", "-o", str(wanted), *python)
    venv_python = str(root / ".venv" / "bin" / "python")
    if not Path(venv_python).exists():
        run_uv(uv, root, "venv", "--quiet", "--clear", ".venv", *python)
    at = ("--default-index", index, "--python", venv_python, "--quiet")
    run_uv(uv, root, "pip", "sync", "--require-hashes", *at, str(wanted))
    run_uv(uv, root, "pip", "install", "--no-deps", *at, "--editable", ".")


def bootstrap(root: Path) -> Path:
    """Bring ``.tools`` and ``.venv`` of the checkout ``root`` up to date; returns the path of uv.

    Raises:
        BootstrapError: git is missing, or a download or an install failed.
    """
    tools, venv = root / ".tools", root / ".venv"
    stamp, writing = tools / "stamp", tools / "writing"
    wanted = fingerprint(root)

    uv = tools / f"uv-{UV_VERSION}" / "uv"

    def ready() -> bool:
        made = all(path.exists() for path in (uv, stamp, venv / "bin" / "python", venv / "bin" / "series"))
        return made and stamp.read_text() == wanted

    if shutil.which("git") is None:
        raise BootstrapError("git is not installed", "apt-get install git")
    if ready():
        return uv
    try:
        tools.mkdir(exist_ok=True)
        with locked(tools / "lock"):
            if ready():  # made by the run that we waited for
                return uv
            index = index_url()
            ensure_uv(tools, index)
            if writing.exists():
                say("the last run was interrupted, making .venv anew")
                shutil.rmtree(venv, ignore_errors=True)
            stamp.unlink(missing_ok=True)
            writing.touch()
            say(f"installing the tool and its dependencies into {venv}")
            install(uv, root, index)
            fresh = stamp.with_suffix(f".{os.getpid()}")
            fresh.write_text(wanted)
            fresh.replace(stamp)
            writing.unlink()
    except OSError as error:
        raise BootstrapError(
            f"{error.filename or tools}: {error.strerror or error}",
            "free some disk space or mend the permissions, and run again",
        ) from error
    say("ready")
    return uv


def main() -> int:
    try:
        print(bootstrap(Path(__file__).resolve().parents[2]))
    except BootstrapError as error:
        say(str(error))
        return 6
    except KeyboardInterrupt:
        say("interrupted; run again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
