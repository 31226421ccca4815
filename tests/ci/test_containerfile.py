"""The Containerfile: its defaults fit the pins; its command puts the wheel in and says what does not fit.

No image is built here; the command of its RUN step runs in an environment that stands for the image.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_series import pins
from vllm_series.workspace import Workspace


def wheel(folder: Path, version: str, build: str = "") -> Path:
    """Make a wheel of a vllm that has one module."""
    path = folder / f"vllm-{version}-{build}py3-none-linux_{platform.machine()}.whl"
    info = f"vllm-{version}.dist-info"
    members = {
        "vllm/__init__.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        f"Tag: py3-none-linux_{platform.machine()}\n",
    }
    record = "".join(f"{name},,\n" for name in (*members, f"{info}/RECORD"))
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (members | {f"{info}/RECORD": record}).items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "ci/Containerfile").read_text()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Python with pip and upstream's vLLM 1.2.0.

    There is no uv, which would look for a Python that is no environment: this machine's.
    """
    place = tmp_path_factory.mktemp("image")
    # virtualenv, which pre-commit needs, brings pip; venv has none on a Debian without python3-venv.
    make = [sys.executable, "-m", "virtualenv", "--quiet", "--no-download", "--app-data", str(place / "data")]
    subprocess.run([*make, str(place / "env")], check=True)
    for tool in ("ls", "uname"):
        (place / "env/bin" / tool).symlink_to(str(shutil.which(tool)))
    upstream = wheel(place / "upstream", "1.2.0")
    unpacked = next((place / "env/lib").glob("python3*")) / "site-packages"
    with zipfile.ZipFile(upstream) as archive:
        archive.extractall(unpacked)
    return place / "env"


def run(text: str, image: Path, dist: Path, version: str = "1.2.0") -> subprocess.CompletedProcess[str]:
    """Run the RUN step's command as a builder does, with ``dist`` where the context is mounted."""
    found = re.search(r"^RUN --mount=type=bind,target=(\S+) ((?:.*\\\n)*.*\n)", text, re.MULTILINE)
    assert found
    command = found[2].replace("\\\n", "").replace(found[1], str(dist))
    env = {"PATH": f"{image}/bin", "VERSION": version, "DSA": "1", "HOME": str(image)}
    return subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, text=True, check=False)


def version_in(image: Path) -> str:
    code = "import vllm; print(vllm.version)"
    return subprocess.check_output([str(image / "bin/python"), "-c", code], text=True).strip()


def test_defaults_are_those_of_a_line(text: str, root: Path) -> None:
    given = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    ws = Workspace(root)
    versions = {pins.load_pin(ws, line).wheel_version for line in pins.lines(ws)}
    assert f"{given['VERSION']}+dsa.{given['DSA']}" in versions


def test_the_documented_command_has_the_context_that_is_mounted(text: str, root: Path) -> None:
    (command,) = re.findall(r"^#   (podman build .*)$", text, re.MULTILINE)
    assert command.split()[-1] == "dist"
    assert command in (root / "docs/operations.md").read_text()


@pytest.mark.parametrize(
    ("names", "version", "why"),
    [
        ((), "1.2.0", "the context needs one wheel of 1.2.0+dsa.1"),
        (("1.1.0+dsa.1",), "1.2.0", "it has: vllm-1.1.0+dsa.1-"),
        (("1.2.0+dsa.1", "1.2.0+dsa.1 1x-"), "1.2.0", "the context needs one wheel of 1.2.0+dsa.1"),
        (("1.3.0+dsa.1",), "1.3.0", "the image has vLLM 1.2.0, the wheel is of 1.3.0"),
    ],
)
def test_what_does_not_fit_stops_the_build(
    text: str, image: Path, tmp_path: Path, names: tuple[str, ...], version: str, why: str
) -> None:
    (tmp_path / "dist").mkdir()
    for name in names:
        wheel(tmp_path / "dist", *name.split())
    done = run(text, image, tmp_path / "dist", version)
    assert done.returncode == 1 and "error: " in done.stderr and why in done.stderr
    assert version_in(image) == "1.2.0"


def test_the_wheel_takes_the_place_of_upstreams(text: str, image: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(image, tmp_path / "env", symlinks=True)
    wheel(tmp_path / "dist", "1.2.0+dsa.1")
    done = run(text, copy, tmp_path / "dist")
    assert done.returncode == 0, done.stderr
    assert version_in(copy) == "1.2.0+dsa.1"
    assert version_in(image) == "1.2.0"


def test_a_failed_install_stops_the_build(text: str, image: Path, tmp_path: Path) -> None:
    broken = wheel(tmp_path / "dist", "1.2.0+dsa.1")
    broken.write_bytes(broken.read_bytes()[:200])
    copy = shutil.copytree(image, tmp_path / "env", symlinks=True)
    done = run(text, copy, tmp_path / "dist")
    assert done.returncode != 0 and broken.name in done.stderr
    assert version_in(copy) == "1.2.0"
