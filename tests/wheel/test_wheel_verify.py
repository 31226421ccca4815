"""`series wheel --verify`: equal bytes pass, anything else names the first member that differs."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from tiny_upstream import Upstream

from vllm_series.errors import CheckFailed, IntegrityError, UsageError
from vllm_series.files import sha256_file
from vllm_series.wheel import verify
from vllm_series.wheel.archive import Source
from vllm_series.wheel.recipe import Kernels
from vllm_series.wheel.repack import repack


@pytest.fixture
def built(upstream: Upstream, tmp_path: Path) -> Path:
    return repack(upstream.recipe(), tmp_path / "dist", tmp_path / "state").path


def rewrite(path: Path, change: dict[str, bytes | None], **header: object) -> None:
    """Write the wheel again with some members changed, dropped or added."""
    with zipfile.ZipFile(path) as old:
        members = [(info, old.read(info)) for info in old.infolist()]
    known = {info.filename for info, _ in members}
    with zipfile.ZipFile(path, "w") as new:
        for info, data in members:
            replacement = change.get(info.filename, data)
            for key, value in header.items():
                setattr(info, key, value)
            if replacement is not None:
                new.writestr(info, replacement)
        for name in set(change) - known:
            new.writestr(zipfile.ZipInfo(name), change[name] or b"")


def test_the_wheel_itself_passes(upstream: Upstream, built: Path, tmp_path: Path) -> None:
    assert verify.claimed(built) == ("1.2.0", "x86_64", True, False)
    assert verify.verify(built, upstream.recipe(), tmp_path / "x") == sha256_file(built)
    assert not list((tmp_path / "x").iterdir())  # the derived copy is gone


def test_a_wheel_of_the_systems_nvcc_is_verified_with_the_systems_nvcc(
    upstream: Upstream, tmp_path: Path
) -> None:
    for source, system in (("system", True), ("package index", False)):
        kernels = Kernels(b"\x7fELF", {"nvcc": {"source": source, "nvcc": "13.0.88", "packages": []}})
        path = repack(upstream.recipe(kernels=kernels), tmp_path / source, tmp_path / "state").path
        assert verify.claimed(path).system_nvcc is system


def test_a_flipped_byte_names_its_member(upstream: Upstream, built: Path, tmp_path: Path) -> None:
    with Source(built) as source:
        offset, _size = source.raw_span(source.members["vllm/_C.so"])
    data = bytearray(built.read_bytes())
    data[offset + 9] ^= 1
    built.write_bytes(data)
    with pytest.raises(CheckFailed, match=r"vllm/_C\.so has other bytes"):
        verify.verify(built, upstream.recipe(), tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vllm/envs.py": b"A = 9\n"}, r"vllm/envs\.py has other content"),
        ({"vllm/envs.py": None}, r"vllm/envs\.py is missing"),
        ({"vllm/zzz.py": b"x"}, r"vllm/zzz\.py is too much"),
    ],
)
def test_a_changed_member_is_named(
    upstream: Upstream, built: Path, tmp_path: Path, change: dict[str, bytes | None], message: str
) -> None:
    rewrite(built, change)
    with pytest.raises(CheckFailed, match=message):
        verify.verify(built, upstream.recipe(), tmp_path / "x")


def test_other_dates_are_named(upstream: Upstream, built: Path, tmp_path: Path) -> None:
    rewrite(built, {}, date_time=(2026, 1, 1, 0, 0, 0))
    with pytest.raises(CheckFailed, match="date, mode or header"):
        verify.verify(built, upstream.recipe(), tmp_path / "x")


def test_bytes_after_the_archive_are_noticed(upstream: Upstream, built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built, "a") as wheel:
        wheel.comment = b"hello"
    with pytest.raises(CheckFailed, match="archive around them"):
        verify.verify(built, upstream.recipe(), tmp_path / "x")


def test_another_series_gives_another_wheel(upstream: Upstream, built: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"vllm/dsa/_provenance\.json has other content"):
        verify.verify(built, upstream.recipe(applied_tree="d" * 40), tmp_path / "x")


def test_upstreams_own_wheel_is_told_apart(upstream: Upstream) -> None:
    with pytest.raises(CheckFailed, match="not a wheel of this series"):
        verify.claimed(upstream.wheel)


def test_a_name_that_hides_missing_kernels_is_refused(upstream: Upstream, tmp_path: Path) -> None:
    path = repack(upstream.recipe(kernels=None), tmp_path / "dist", tmp_path / "state").path
    assert verify.claimed(path) == ("1.2.0", "x86_64", False, False)
    renamed = path.rename(path.with_name(re.sub("-0nokernels", "", path.name)))
    with pytest.raises(CheckFailed, match="file name says otherwise"):
        verify.claimed(renamed)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        verify.claimed(tmp_path / "x.whl")
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(UsageError, match="not a wheel's file name"):
        verify.claimed(tmp_path / "x.zip")
    truncated = tmp_path / "vllm-1.2.0-py3-none-any.whl"
    truncated.write_bytes(b"PK\x03\x04 truncated")
    with pytest.raises(IntegrityError, match="is not a wheel"):
        verify.claimed(truncated)
