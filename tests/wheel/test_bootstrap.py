"""Bootstrap: a pinned uv from an index, checked, renamed into place; errors name the mending step."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def boot(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", root / "scripts/lib/bootstrap.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index(tmp_path: Path, boot: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index on disk that offers a small stand-in for uv's wheel, pinned by its real hash."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr("uv-9.data/scripts/uv", "#!/bin/sh\necho fake uv\n")
    name = "uv-9-py3-none-any.whl"
    folder = tmp_path / "simple" / "uv"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(buffer.getvalue())
    (folder / "index.html").write_text(f'<a href="other.whl">x</a><a href="{name}#sha256=0">{name}</a>')
    pin = (name, hashlib.sha256(buffer.getvalue()).hexdigest())
    monkeypatch.setattr(boot, "UV_WHEELS", {platform.machine().lower(): pin})
    return tmp_path / "simple"


def test_uv_is_unpacked_once(boot: ModuleType, index: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    uv = boot.ensure_uv(tools, index.as_uri())
    assert subprocess.check_output([str(uv)], text=True) == "fake uv\n"
    shutil.rmtree(index)  # the second call must not need the index
    assert boot.ensure_uv(tools, index.as_uri()) == uv
    assert [p.name for p in tools.iterdir()] == [uv.parent.name]


def test_changed_file_is_refused(boot: ModuleType, index: Path, tmp_path: Path) -> None:
    wheel = next(index.glob("uv/*.whl"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(boot.BootstrapError, match="pinned"):
        boot.ensure_uv(tmp_path, index.as_uri())
    assert not list(tmp_path.glob("uv-*")) and not list(tmp_path.glob(".uv-*"))


def test_index_without_the_file(boot: ModuleType, index: Path, tmp_path: Path) -> None:
    (index / "uv" / "index.html").write_text("<a href='x'>x</a>")
    with pytest.raises(boot.BootstrapError, match="does not offer"):
        boot.ensure_uv(tmp_path, index.as_uri())


def test_unknown_machine(boot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot.platform, "machine", lambda: "riscv64")
    with pytest.raises(boot.BootstrapError, match="riscv64"):
        boot.ensure_uv(tmp_path, "https://index.invalid/simple")


def test_no_network_names_the_mend(boot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "TRIES", 1)
    with pytest.raises(boot.BootstrapError, match="check the network") as caught:
        boot.ensure_uv(tmp_path, "http://user:secret@127.0.0.1:9/simple")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "https://pypi.org/simple"),
        ({"PIP_INDEX_URL": "https://a/simple/"}, "https://a/simple"),
        ({"PIP_INDEX_URL": "https://a/simple", "UV_DEFAULT_INDEX": "https://b/simple"}, "https://b/simple"),
        ({"UV_DEFAULT_INDEX": "mirror=https://b/simple"}, "https://b/simple"),
    ],
)
def test_index_choice(
    boot: ModuleType, env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert boot.index_url() == expected


def test_missing_git(boot: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(boot.BootstrapError, match="apt-get install git"):
        boot.bootstrap(root)


def test_old_python_is_named(root: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(old)}
    done = subprocess.run(
        ["bash", "-c", f". {root}/scripts/lib/env.sh"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "not Python 3.11 or newer" in done.stderr and "apt-get install python3" in done.stderr


def test_a_persons_shell_stays_open(root: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python3.12"}
    shell = ["bash", "--norc", "-ic", f". {root}/scripts/lib/env.sh; echo still here: $?"]
    done = subprocess.run(
        shell, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True
    )
    assert "PYTHON=/nowhere/python3.12" in done.stderr and "still here: 2" in done.stdout


def test_a_python_that_is_not_there_is_not_replaced_by_another(root: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python3.12"}
    done = subprocess.run(
        ["bash", "-c", f". {root}/scripts/lib/env.sh"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "PYTHON=/nowhere/python3.12" in done.stderr


def test_activated_environment_and_bare_machine(root: Path) -> None:
    """The own environment is not taken as base Python, and the machine's certificates are named to uv."""
    shell = f"""
        PATH={root}/.venv/bin:{Path(sys.base_prefix) / "bin"}:/usr/bin:/bin
        . {root}/scripts/lib/env.sh; echo "$VLLM_SERIES_PYTHON $SSL_CERT_FILE"; command -v python"""
    done = subprocess.run(["bash", "-c", shell], env={"HOME": "/root"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    python, certificates = done.stdout.splitlines()[0].split()
    assert not python.startswith(str(root))
    assert Path(certificates).is_file()
    assert done.stdout.splitlines()[1] == f"{root}/.venv/bin/python"  # PATH itself is left alone


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_ascii_locale_cannot_break_a_folder_with_other_letters(root: Path, locale: str) -> None:
    shell = f'. {root}/scripts/lib/env.sh; echo "$LC_ALL"'
    env = {"HOME": "/root", "LC_ALL": locale, "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "C.UTF-8\n"), done.stderr


def test_lock_names_only_pypi(root: Path) -> None:
    hosts = set()
    lock = tomllib.loads((root / "uv.lock").read_text())
    for package in lock["package"]:
        hosts.add(package["source"].get("registry", "local"))
        for item in [*package.get("wheels", []), *filter(None, [package.get("sdist")])]:
            hosts.add("/".join(item["url"].split("/")[:3]))
            assert item["hash"].startswith("sha256:")
    assert hosts <= {"https://pypi.org/simple", "https://files.pythonhosted.org", "local"}


def _small_checkout(root: Path, target: Path) -> Path:
    """A copy of what bootstrap needs, small enough to install in a second."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "uv.lock"):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target / name)
    shutil.copytree(root / "scripts/lib", target / "scripts/lib")
    shutil.copytree(root / "src", target / "src")
    return target


@pytest.mark.slow
def test_concurrent_then_interrupted_then_warm(root: Path, tmp_path: Path) -> None:
    """Real uv and index: two runs at once, a run after one that died while writing, a no-op."""
    checkout = _small_checkout(root, tmp_path / "c ü")
    command = [sys.executable, "-I", str(checkout / "scripts/lib/bootstrap.py")]
    env = {**os.environ, "HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    pair = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [run.communicate(timeout=180)[1] for run in pair]
    assert [run.returncode for run in pair] == [0, 0], texts
    assert sum("fetching uv" in text for text in texts) == 1
    assert subprocess.run([str(checkout / ".venv/bin/python"), "-c", "import vllm_series"]).returncode == 0

    # A run that was killed while installing leaves its mark: the environment is made anew.
    (checkout / ".tools/stamp").unlink()
    (checkout / ".tools/writing").touch()
    leftover = checkout / ".venv/half-written"
    leftover.touch()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "interrupted" in done.stderr
    assert not leftover.exists()

    done = subprocess.run(command, env={**env, "UV_OFFLINE": "1"}, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and done.stderr == ""
