"""Missing and broken tools (g++, nvcc, the download): a clear error with the line that mends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kernel_checkouts import Checkouts

from vllm_series import kernels
from vllm_series.errors import CheckFailed, FetchFailed, IntegrityError, NeedsPerson, UsageError
from vllm_series.fetch import fetch
from vllm_series.kernels import KernelBuild, host, toolchain
from vllm_series.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_missing_gxx_stops_with_the_line_to_type(empty_path: Path, ws: Workspace) -> None:
    with pytest.raises(NeedsPerson) as caught:
        kernels.build(ws)
    assert caught.value.exit_code == 3
    assert "g++" in str(caught.value) and "--no-kernels" in str(caught.value)
    program(empty_path, "dnf", "exit 9")
    with pytest.raises(NeedsPerson, match=r"dnf install -y gcc-c\+\+"):
        kernels.build(ws)


def test_missing_gxx_without_root_names_sudo(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    program(empty_path, "apt-get", f'echo "$@" >> "{ran}"')
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NeedsPerson, match=r"sudo sh -c 'apt-get update && apt-get install -y"):
        host.find()
    assert not ran.exists(), "nothing is installed without root"


def test_missing_gxx_is_installed_by_root(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """apt-get is a program of this test: it leaves a note of its call and, on install, a g++ on PATH."""
    ran, real = tmp_path / "ran", shutil.which("g++", path=os.defpath + ":/usr/bin:/usr/local/bin")
    assert real
    install = (
        f'echo "$DEBIAN_FRONTEND $*" >> "{ran}"; [ "$1" != install ] || /bin/ln -s {real} "{empty_path}/g++"'
    )
    program(empty_path, "apt-get", install)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tools = host.find()
    assert tools.cxx == empty_path / "g++"
    assert ran.read_text().splitlines() == [
        "noninteractive update",
        "noninteractive install -y --no-install-recommends g++",
    ]


def test_a_failing_apt_get_is_reported(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(empty_path, "apt-get", "exit 100")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(NeedsPerson, match="through apt-get failed") as caught:
        host.find()
    assert "apt-get install -y" in caught.value.fix


def test_unusable_compilers(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(empty_path, "g++", 'case $1 in --version) echo "g++ 99.1.0";; -dumpversion) echo 99;; esac')
    with pytest.raises(NeedsPerson, match=r"is version 99; the pinned nvcc accepts g\+\+ up to 15"):
        host.find(15)
    program(empty_path, "g++", "exit 1")
    with pytest.raises(NeedsPerson, match="does not work as a C"):
        host.find()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NeedsPerson, match="CXX=no-such-compiler"):
        host.find()


def test_system_nvcc(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(UsageError, match="no nvcc on PATH"):
        toolchain.system()
    program(empty_path, "nvcc", 'echo "Cuda compilation tools, release 12.4, V12.4.131"')
    with pytest.raises(UsageError, match=r"12\.4\.131; the kernels need at least 12\.9"):
        toolchain.system()
    program(empty_path, "nvcc", 'echo "Cuda compilation tools, release 13.1, V13.1.80"')
    found = toolchain.system()
    assert (found.cuda, found.record["source"], found.record["nvcc"]) == ("13.1", "system", "13.1.80")
    assert list(found.record["programs"]) == ["nvcc"]
    monkeypatch.setenv("CUDA_HOME", str(empty_path / "nowhere"))
    with pytest.raises(UsageError, match="CUDA_HOME"):
        toolchain.system()


def test_pins_cover_both_platforms_and_are_checked(ws: Workspace, checkouts: Checkouts) -> None:
    names = [{a.project for _, a in toolchain.load(ws, machine).packages} for machine in toolchain.PLATFORMS]
    assert names[0] == names[1] and len(names[0]) == 5
    with pytest.raises(UsageError, match="riscv64"):
        toolchain.load(ws, "riscv64")
    other = checkouts("pins")
    file = other.pins / "toolchain" / "nvcc.toml"
    for text in (
        "",
        "schema = 2\n",
        'schema = 1\ncuda = "13.0"\nnvcc = "x"\nnewest_gcc = 15\npackage = []\n',
        "= broken",
    ):
        file.write_text(text)
        with pytest.raises(CheckFailed, match=r"nvcc\.toml"):
            toolchain.load(other)
    file.unlink()
    with pytest.raises(CheckFailed, match="git checkout"):
        toolchain.load(other)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A package index on this machine: its address and its folder."""
    root = tmp_path / "index"
    root.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", root
    server.shutdown()
    thread.join()


def test_a_changed_compiler_package_is_refused(
    ws: Workspace,
    checkouts: Checkouts,
    mirror: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The index delivers nvidia-cuda-crt with one byte changed: exit code 4, nothing unpacked."""
    address, root = mirror
    crt = next(a for _, a in toolchain.load(ws).packages if a.project == "nvidia-cuda-crt")
    good = fetch(ws, crt).read_bytes()
    page = root / crt.project / "index.html"
    page.parent.mkdir()
    page.write_text(f'<a href="{address}/{crt.filename}">{crt.filename}</a>')
    (root / crt.filename).write_bytes(good[:1000] + bytes([good[1000] ^ 1]) + good[1001:])

    other = checkouts("mirror")
    file = other.pins / "toolchain" / "nvcc.toml"
    head, *packages = file.read_text().split("[[package]]")
    file.write_text(head + "".join("[[package]]" + p for p in packages if crt.filename in p))
    monkeypatch.setenv("VLLM_SERIES_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("VLLM_SERIES_INDEX", address)
    with pytest.raises(IntegrityError, match="sha256") as caught:
        kernels.build(other)
    assert caught.value.exit_code == 4
    assert not list((tmp_path / "empty" / "toolchain").glob("nvcc-*"))

    # Gone from the index: exit code 6 and the ways out.
    (root / crt.filename).unlink()
    with pytest.raises(FetchFailed, match="the pinned nvcc: ") as gone:
        kernels.build(other)
    assert gone.value.exit_code == 6
    for way in ("series kernels build --source DIR", "--system-nvcc", "--no-kernels"):
        assert way in gone.value.fix

    # The right bytes on the same index: the next run goes on, up to the compiler that this short pin lacks.
    (root / crt.filename).write_bytes(good)
    with pytest.raises(NeedsPerson, match="does not run"):
        kernels.build(other)


def link(source: str, target: str) -> None:
    """Hard link where that is possible: the compiler is 271 MB."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture
def own_cache(built: KernelBuild, ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the downloaded packages only, and no network."""
    for _, artifact in toolchain.load(ws).packages:
        folder = fetch(ws, artifact).parent
        shutil.copytree(folder, tmp_path / folder.name, copy_function=link)
    monkeypatch.setenv("VLLM_SERIES_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_SERIES_OFFLINE", "1")
    return tmp_path


def unpack_in_a_process(limit: int | None = None) -> subprocess.Popen[str]:
    """Start `toolchain.pinned` in a process of its own, which may write no file beyond ``limit`` bytes."""
    limited = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n" if limit else ""
    )
    code = f"""{limited}from pathlib import Path
from vllm_series.errors import SeriesError
from vllm_series.kernels import toolchain
from vllm_series.workspace import Workspace
try:
    toolchain.pinned(Workspace(Path({str(ROOT)!r})))
except SeriesError as error:
    print(error)
    raise SystemExit(error.exit_code)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_unpacking_survives_a_kill_a_full_disk_and_a_cleaner(own_cache: Path, ws: Workspace) -> None:
    folder = own_cache / "toolchain"

    # Killed in the middle: nothing that looks finished.
    run = unpack_in_a_process()
    end = time.monotonic() + 600
    while not list(folder.glob(".nvcc-*/root/nvidia/cu13/bin/nvcc")):
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    run.kill()
    run.communicate()
    assert not list(folder.glob("nvcc-*"))
    assert list(folder.glob(".nvcc-*/"))

    # No room: exit code 6, what to do, and nothing left behind, not even by the killed run.
    run = unpack_in_a_process(limit=20_000_000)
    said = run.communicate()[0]
    assert run.returncode == 6, said
    assert "cannot unpack nvcc" in said and "VLLM_SERIES_CACHE" in said
    assert not [path for path in folder.iterdir() if path.is_dir()]

    # The next run works; so does one after a cache cleaner took a file.
    for _ in range(2):
        nvcc = toolchain.pinned(ws).nvcc
        assert nvcc.is_relative_to(folder) and toolchain._intact(nvcc.parents[3])
        assert (nvcc.parent / "fatbinary").stat().st_mode & 0o111 == 0o111
        (nvcc.parent / "fatbinary").unlink()
        assert not toolchain._intact(nvcc.parents[3])
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [nvcc.parents[3].name]


@pytest.mark.slow
def test_packages_are_taken_from_a_folder(
    own_cache: Path, ws: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = tmp_path_factory.mktemp("given")
    for path in own_cache.glob("*/*.whl"):
        path.rename(given / path.name)
    assert len(list(given.iterdir())) == 5
    with pytest.raises(FetchFailed, match="the pinned nvcc: "):
        toolchain.pinned(ws)
    assert toolchain.pinned(ws, [given]).nvcc.is_relative_to(own_cache)
