"""Repack on a tiny upstream: content, names, reproducibility, refusals."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import parse_wheel_filename
from tiny_upstream import BUILT_FILES, COMMA, FILENAME, SOURCE_FILES, Upstream, entry, write_upstream_wheel

from vllm_series.errors import CheckFailed, IntegrityError
from vllm_series.files import sha256_file
from vllm_series.kernels import toolchain
from vllm_series.wheel import provenance, record
from vllm_series.wheel.recipe import Kernels
from vllm_series.wheel.repack import repack
from vllm_series.workspace import Workspace

INFO = "vllm-1.2.0+dsa.3.dist-info"


def build(upstream: Upstream, tmp_path: Path, **changes: object) -> Path:
    return repack(upstream.recipe(**changes), tmp_path / "dist", tmp_path / "state").path


def test_name_version_and_content(upstream: Upstream, tmp_path: Path) -> None:
    path = build(upstream, tmp_path)
    assert path.name == "vllm-1.2.0+dsa.3-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        names = wheel.namelist()
        read = {name: wheel.read(name) for name in names}
    assert read["vllm/envs.py"] == b"A = 1\nB = 2\n"
    assert read["vllm/new,file.py"] == b"NEW = 1\n"
    assert "vllm/old.py" not in read
    assert read["vllm/dsa/__init__.py"].startswith(b"def info")
    assert read["vllm/_dsa_C.so"] == b"\x7fELF kernels"
    assert read[COMMA] == SOURCE_FILES[COMMA] and read["vllm/_C.so"] == BUILT_FILES["vllm/_C.so"]
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "vllm-1.2.0.dist-info"))]

    scope: dict[str, object] = {}
    exec(read["vllm/_version.py"], scope)
    assert scope["version"] == scope["__version__"] == "1.2.0+dsa.3"
    assert scope["version_tuple"] == (1, 2, 0, "dsa.3")
    assert scope["commit_id"] == "gabcdef123"
    head, body = read[f"{INFO}/METADATA"].split(b"\n\n", 1)
    assert b"\nVersion: 1.2.0+dsa.3\n" in head and b"\nVersion: 1.2.0\n" in b"\n" + body
    assert b"\nRequires-Python: <3.15,>=3.10\n" in head
    wheel_file = read[f"{INFO}/WHEEL"].decode().splitlines()
    assert wheel_file[:3] == ["Wheel-Version: 1.0", "Generator: vllm-series (test)", "Root-Is-Purelib: false"]
    assert [line for line in wheel_file if line.startswith(("Tag", "Build"))] == [
        "Tag: cp38-abi3-manylinux_2_28_x86_64"
    ]


def test_record_lists_each_file_once_with_its_hash(upstream: Upstream, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(upstream, tmp_path)) as wheel:
        rows = list(csv.reader(io.StringIO(wheel.read(f"{INFO}/RECORD").decode())))
        assert sorted(row[0] for row in rows) == sorted(wheel.namelist())
        assert rows[-1] == [f"{INFO}/RECORD", "", ""]
        for name, digest, size in rows[:-1]:
            assert record.row_of(wheel.read(name)) == record.Row(digest, int(size)), name


def test_members_are_sorted_dated_alike_and_keep_the_executable_bit(
    upstream: Upstream, tmp_path: Path
) -> None:
    with zipfile.ZipFile(build(upstream, tmp_path)) as wheel:
        infos = wheel.infolist()
    package = [info.filename for info in infos if info.filename.startswith("vllm/")]
    assert package == sorted(package) == [info.filename for info in infos][: len(package)]
    assert infos[-1].filename == f"{INFO}/RECORD"
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    modes = {info.filename: info.external_attr >> 16 for info in infos}
    assert modes["vllm/_C.so"] == modes["vllm/_dsa_C.so"] == 0o100755
    assert {mode for name, mode in modes.items() if not name.endswith(".so")} == {0o100644}


def test_same_bytes_twice_whatever_the_dates(upstream: Upstream, tmp_path: Path) -> None:
    first = build(upstream, tmp_path / "a")
    upstream.wheel.touch()
    second = build(upstream, tmp_path / "b")
    assert first != second and sha256_file(first) == sha256_file(second)


def test_each_python_writes_the_same_bytes(
    upstream: Upstream, tmp_path: Path, root: Path, pythons: dict[str, Path]
) -> None:
    """The zip writer leans on zipfile: its bytes must not depend on the Python version."""
    digests = {}
    program = (
        "import sys; from pathlib import Path\n"
        "from vllm_series.wheel.archive import *\n"
        "source = Source(Path(sys.argv[1]))\n"
        "new = [Copied('r/' + n, i) for n, i in source.members.items()]\n"
        "new += [Stored('é,x.py', b'1' * 5000)]\n"
        "write(Path(sys.argv[2]), source, new)\n"
    )
    for minor, python in pythons.items():
        target = tmp_path / f"{minor}.zip"
        env = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin"}
        # The package's __init__ modules are plain, so a bare interpreter can import the archive module.
        subprocess.run([python, "-c", program, upstream.wheel, target], env=env, check=True)
        digests[minor] = sha256_file(target)
    assert len(set(digests.values())) == 1, digests


def test_unchanged_members_are_copied_raw(upstream: Upstream, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(upstream, tmp_path)) as new, zipfile.ZipFile(upstream.wheel) as old:
        for name in ("vllm/_C.so", "vllm/data.txt"):
            mine, theirs = new.getinfo(name), old.getinfo(name)
            assert (mine.compress_size, mine.compress_type) == (theirs.compress_size, zipfile.ZIP_DEFLATED)


def test_provenance(upstream: Upstream, tmp_path: Path) -> None:
    recipe = upstream.recipe()
    with zipfile.ZipFile(build(upstream, tmp_path)) as wheel:
        text = wheel.read(provenance.PATH).decode()
    found = json.loads(text)
    assert found["line"] == "1.2.0" and found["version"] == "1.2.0+dsa.3" and found["series_version"] == "3"
    assert found["upstream_commit"] == "abcdef123" and found["applied_tree"] == "c" * 40
    assert found["upstream_wheel"] == {"filename": FILENAME, "sha256": recipe.artifact.sha256}
    assert found["patches"][0]["name"] == "0001-hook.patch"
    assert found["patches"][0]["trailers"]["Feature"] == ["core"]
    assert found["overlay"]["files"] == 1 and found["kernels"] == {"nvcc": "13.0.88"}
    assert str(tmp_path) not in text and "/root" not in text


def test_sbom_is_valid_cyclonedx_with_pedigree(upstream: Upstream, tmp_path: Path) -> None:
    first, second = build(upstream, tmp_path / "a"), build(upstream, tmp_path / "b", applied_tree="d" * 40)
    texts = []
    for path in (first, second):
        with zipfile.ZipFile(path) as wheel:
            texts.append(wheel.read(f"{INFO}/sboms/vllm-series.cdx.json").decode())
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(texts[0])
    assert problem is None, problem
    found = json.loads(texts[0])
    assert "timestamp" not in found["metadata"]
    component = found["metadata"]["component"]
    assert component["purl"] == "pkg:pypi/vllm@1.2.0%2Bdsa.3"
    assert {one["version"] for one in component["pedigree"]["ancestors"]} == {"1.2.0"}
    (patch,) = component["pedigree"]["patches"]
    assert patch["type"] == "unofficial" and "diff --git" in patch["diff"]["text"]["content"]
    assert patch["resolves"][0]["source"]["url"].endswith("/pull/1")
    assert found["serialNumber"] != json.loads(texts[1])["serialNumber"]


def _sbom(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as wheel:
        text = wheel.read(f"{INFO}/sboms/vllm-series.cdx.json").decode()
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert problem is None, problem
    return cast(dict[str, Any], json.loads(text))


def test_sbom_lists_the_packages_that_compiled_the_kernels(
    upstream: Upstream, tmp_path: Path, root: Path
) -> None:
    """The record that a real build of this checkout gives: each package of the pinned nvcc, with its hash."""
    pin = toolchain.load(Workspace(root), "x86_64")
    rows = [
        {"name": a.project, "version": version, "filename": a.filename, "sha256": a.sha256}
        for version, a in pin.packages
    ]
    record = {"nvcc": {"source": "package index", "nvcc": pin.nvcc, "packages": rows}}
    found = _sbom(build(upstream, tmp_path / "pinned", kernels=Kernels(b"\x7fELF", record)))
    listed = {one["purl"].partition("?")[0]: one for one in found["components"]}
    assert set(listed) == {f"pkg:pypi/{row['name']}@{row['version']}" for row in rows}
    assert {"nvidia-cuda-nvcc", "nvidia-nvvm"} <= {one["name"] for one in found["components"]}
    assert all(one["scope"] == "excluded" for one in found["components"]), "nothing of them is in the wheel"
    hashes = {one["hashes"][0]["content"] for one in found["components"]}
    assert hashes == {row["sha256"] for row in rows}

    record = {
        "nvcc": {"source": "system", "nvcc": "13.1.5", "programs": {"nvcc": "a" * 64, "cicc": "b" * 64}}
    }
    other = _sbom(build(upstream, tmp_path / "system", kernels=Kernels(b"\x7fELF", record)))
    (nvcc,) = other["components"]
    assert (nvcc["name"], nvcc["version"], nvcc["scope"]) == ("nvcc", "13.1.5", "excluded")
    assert {"name": "vllm-series:sha256:cicc", "value": "b" * 64} in nvcc["properties"]
    assert other["serialNumber"] != found["serialNumber"]
    assert "components" not in _sbom(build(upstream, tmp_path / "none", kernels=None))


def test_without_kernels_the_file_name_says_so(upstream: Upstream, tmp_path: Path) -> None:
    path = build(upstream, tmp_path, kernels=None)
    assert path.name == "vllm-1.2.0+dsa.3-0nokernels-cp38-abi3-manylinux_2_28_x86_64.whl"
    _name, _version, tag, _tags = parse_wheel_filename(path.name)
    assert tag == (0, "nokernels")
    with zipfile.ZipFile(path) as wheel:
        assert "vllm/_dsa_C.so" not in wheel.namelist()
        assert b"\nBuild: 0nokernels\n" in wheel.read(f"{INFO}/WHEEL")
        assert json.loads(wheel.read(provenance.PATH))["kernels"] == "none"


def test_nothing_to_do_is_noticed_and_damage_is_mended(upstream: Upstream, tmp_path: Path) -> None:
    recipe, dist, state = upstream.recipe(), tmp_path / "dist", tmp_path / "state"
    first = repack(recipe, dist, state)
    assert not first.reused and repack(recipe, dist, state).reused
    first.path.write_bytes(first.path.read_bytes()[:-7])
    again = repack(recipe, dist, state)
    assert not again.reused and again.sha256 == first.sha256 == sha256_file(again.path)
    other = repack(upstream.recipe(changed={"vllm/envs.py": b"A = 3\n"}), dist, state)
    assert not other.reused and other.sha256 != first.sha256


@pytest.mark.parametrize(
    "path",
    ["csrc/ops.cu", "cmake/x.cmake", "CMakeLists.txt", "rust/src/a.rs", "setup.py", "pyproject.toml",
     "requirements/common.txt", "vllm/grpc/x.proto"],
)  # fmt: skip
def test_refuses_a_patch_of_what_was_compiled(upstream: Upstream, tmp_path: Path, path: str) -> None:
    patch = entry("0007-native.patch", (path,))
    with pytest.raises(CheckFailed, match=r"0007-native\.patch.*built without") as caught:
        build(upstream, tmp_path, changed={path: b"x"}, patches=(patch,))
    assert path in str(caught.value)
    assert not list((tmp_path / "dist").glob("*"))


def test_a_source_only_patch_is_left_without_effect(upstream: Upstream, tmp_path: Path) -> None:
    patch = entry("0008-cmake.patch", ("cmake/x.cmake",), Wheel=["source-only [needs a CUDA build]"])
    path = build(upstream, tmp_path, changed={"cmake/x.cmake": b"x"}, patches=(patch,))
    with zipfile.ZipFile(path) as wheel:
        assert not [name for name in wheel.namelist() if "cmake" in name]
        found = json.loads(wheel.read(provenance.PATH))
    assert found["patches"][0]["trailers"]["Wheel"] == ["source-only [needs a CUDA build]"]


def test_refuses_a_patch_of_a_generated_file(upstream: Upstream, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"third_party/gen\.py.*generates it"):
        build(upstream, tmp_path, changed={"vllm/third_party/gen.py": b"x"})


@pytest.mark.parametrize("path", ["vllm/envs.py", "vllm/third_party/gen.py", "vllm/data.txt"])
def test_refuses_an_overlay_that_shadows_upstream(upstream: Upstream, tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckFailed, match="shadows"):
        build(upstream, tmp_path, overlay={path: b"x"})


def test_refuses_a_wheel_of_another_source(upstream: Upstream, tmp_path: Path) -> None:
    upstream.source["vllm/data.txt"] = b"another release"
    with pytest.raises(IntegrityError, match=r"vllm/data\.txt has other bytes"):
        build(upstream, tmp_path)
    upstream.source["vllm/data.txt"] = SOURCE_FILES["vllm/data.txt"]
    upstream.source["vllm/lost.py"] = b""
    with pytest.raises(IntegrityError, match=r"vllm/lost\.py is missing"):
        build(upstream, tmp_path)


def test_refuses_a_wheel_whose_record_is_incomplete(upstream: Upstream, tmp_path: Path) -> None:
    with zipfile.ZipFile(upstream.wheel, "a") as wheel:
        wheel.writestr("vllm/extra.py", "x")
    with pytest.raises(IntegrityError, match=r"vllm/extra\.py"):
        build(upstream, tmp_path)


def test_refuses_what_is_not_a_wheel(upstream: Upstream, tmp_path: Path) -> None:
    recipe = upstream.recipe()
    upstream.wheel.write_bytes(b"<html>proxy error</html>")
    with pytest.raises(IntegrityError, match="is not a wheel"):
        repack(recipe, tmp_path / "dist", tmp_path / "state")


def test_refuses_another_version_in_the_wheel(upstream: Upstream, tmp_path: Path) -> None:
    pin = upstream.recipe().pin
    other = dataclasses.replace(pin, source=dataclasses.replace(pin.source, version="1.3.0"))
    with pytest.raises(IntegrityError, match="expected exactly one line"):
        build(upstream, tmp_path, pin=other)


def test_pip_installs_it_beside_its_comma_names(upstream: Upstream, tmp_path: Path) -> None:
    """A real installer accepts file name, tags, RECORD and metadata."""
    from vllm_series.wheel.uvtool import Uv, find_uv
    from vllm_series.workspace import Workspace

    path = build(upstream, tmp_path)
    uv = Uv(find_uv(Workspace.find(Path(__file__))), tmp_path / "cache")
    python = uv.venv(tmp_path / "env", Path(sys.executable))
    uv.install(python, "--no-deps", "--offline", path)
    code = "import vllm, importlib.metadata as m; print(vllm.__version__, m.version('vllm'))"
    said = subprocess.check_output([python, "-I", "-c", code], text=True)
    assert said.split() == ["1.2.0+dsa.3"] * 2
    assert list((tmp_path / "env").rglob("E=1,N=2*.json"))


def test_wheel_with_an_odd_upstream_member_order(upstream: Upstream, tmp_path: Path) -> None:
    """Only content decides: members in another order give the same list."""
    other = Upstream(tmp_path / "other" / FILENAME, upstream.source)
    other.wheel.parent.mkdir()
    write_upstream_wheel(other.wheel, dict(reversed({**SOURCE_FILES, **BUILT_FILES}.items())))
    shutil.copystat(upstream.wheel, other.wheel)
    with (
        zipfile.ZipFile(build(upstream, tmp_path / "a")) as one,
        zipfile.ZipFile(build(other, tmp_path / "b")) as two,
    ):
        assert one.namelist() == two.namelist()
