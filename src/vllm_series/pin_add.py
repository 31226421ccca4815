"""`series pin add`: makes a pin for an upstream release from what the index and its files say, and proves
it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import tomlkit
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from tomlkit.items import Table

from vllm_series import fetch, importer, index, lock, pins, sdist, stack
from vllm_series.errors import FetchFailed, IntegrityError, UsageError
from vllm_series.files import write_atomic
from vllm_series.pins import Artifact, Pin, Source
from vllm_series.ui import say
from vllm_series.workspace import Workspace

_TORCH = re.compile(r"^torch\s*==\s*([0-9][^\s;#]*)", re.MULTILINE)
_TORCH_FILES = ("requirements/cuda.txt", "requirements/build/cuda.txt", "requirements/build.txt")
_DEEPGEMM_FILE = "cmake/external_projects/deepgemm.cmake"
_REPOSITORY = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?[\"\s)]")
_TAG = re.compile(r"(?:_TAG|GIT_TAG)\s+\"?([0-9a-f]{7,40})\b")
PLATFORMS = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Added:
    """The new pin and, per platform, how many files of the wheel's ``vllm/`` are byte-equal to the
    sdist's."""

    pin: Pin
    compared: dict[str, int]


def add(ws: Workspace, version: str, sources: Iterable[Path] = (), *, yanked: bool = False) -> Added:
    """Fetch and check a release and write ``pins/<version>.toml`` and an empty ``patches/<version>``.

    ``yanked`` accepts a release that was yanked.

    Raises:
        UsageError: the version is malformed or is pinned already, or the release does not exist, was
        yanked, or has
            no sdist or no wheel.
        IntegrityError: wheel and sdist differ.
        FetchFailed: the index or its files cannot be had.
    """
    try:
        wanted = Version(version)
    except InvalidVersion as err:
        raise UsageError(f"{version!r} is not a version", fix="for example: series pin add 0.34.0") from err
    line = str(wanted)
    if (ws.pins / f"{line}.toml").exists():
        raise UsageError(
            f"pins/{line}.toml is there already", fix=f"edit it, or remove it to add {line} anew"
        )
    given = list(sources)
    archive, wheels = release(wanted, yanked=yanked)
    source = fetch.fetch(ws, archive, given)
    commit = sdist.commit_id(source)
    files = {m.path: m.data for m in sdist.members(source) if m.mode != "120000"}
    compared = {platform: compare(fetch.fetch(ws, wheel, given), files) for platform, wheel in wheels.items()}
    repository, deepgemm = _deepgemm(files, source.name)
    draft = Pin(
        line=line,
        role="candidate",
        dsa=1,
        source=Source(str(wanted), commit, "", archive),
        wheels=wheels,
        torch=_torch(files, source.name),
        deepgemm_repository=repository,
        deepgemm_commit=deepgemm,
        path=ws.pins / f"{line}.toml",
    )
    tree = importer.odb(ws).tree_of(importer.import_pin(ws, draft, given))
    if not (ws.patches(line) / "series").exists():
        note = f"# Patches of line {line}, in the order in which they are applied: one file name a line.\n"
        write_atomic(ws.patches(line) / "series", note)
    imported = replace(draft, source=replace(draft.source, tree=tree))
    lock.write(ws, lock.lock_of(ws, stack.current(ws, imported)))
    write_atomic(draft.path, render(draft, tree))  # last: a run that was killed before can be repeated
    return Added(pins.load_pin(ws, line), compared)


def release(
    wanted: Version, *, yanked: bool = False, need_wheel: bool = True
) -> tuple[Artifact, dict[str, Artifact]]:
    """Return a release's sdist and, per platform, its wheel.

    Raises:
        UsageError: it does not exist, was yanked, or lacks its sdist, or its wheel and ``need_wheel`` is set.
        FetchFailed: the index cannot be had.
    """
    archive: Artifact | None = None
    wheels: dict[str, Artifact] = {}
    withdrawn = ""
    versions: set[Version] = set()
    with index.client() as http:
        for row in index.list_files(http, "vllm"):
            version, platform = _kind(row.filename)
            if version is None:
                continue
            versions.add(version)
            if version != wanted:
                continue
            withdrawn = withdrawn or row.yanked
            if platform == "sdist":
                archive = _artifact(http, row)
            elif platform and (platform not in wheels or row.filename < wheels[platform].filename):
                wheels[platform] = _artifact(http, row)
    where = index.shown(index.index_url())
    if wanted not in versions:
        newest = ", ".join(str(v) for v in sorted(versions)[-3:]) or "none"
        raise UsageError(f"{where} has no vLLM {wanted} (newest: {newest})", fix="name one of its releases")
    if withdrawn and not yanked:
        raise UsageError(
            f"vLLM {wanted} was yanked ({withdrawn})",
            fix="take another release, or add --yanked if you must have it",
        )
    if archive is None:
        raise UsageError(f"vLLM {wanted} has no sdist on {where}", fix="take a release with a source archive")
    if not wheels and need_wheel:
        raise UsageError(
            f"vLLM {wanted} has a sdist but no {' or '.join(PLATFORMS)} wheel on {where}",
            fix="wait for the release to be complete, or take another one",
        )
    return archive, {platform: wheels[platform] for platform in PLATFORMS if platform in wheels}


def newest() -> str:
    """Return the highest final version on the index that has an sdist and was not yanked.

    Raises:
        FetchFailed: the index cannot be had, or offers none.
    """
    with index.client() as http:
        rows = [(_kind(row.filename), row.yanked) for row in index.list_files(http, "vllm")]
    found = [v for (v, kind), gone in rows if v and kind == "sdist" and not gone and not v.is_prerelease]
    if not found:
        raise FetchFailed(
            f"{index.shown(index.index_url())} offers no release of vLLM", fix="check VLLM_SERIES_INDEX"
        )
    return str(max(found))


def _kind(filename: str) -> tuple[Version | None, str]:
    """Return version and ``sdist``, ``x86_64``, ``aarch64`` or '' (a wheel of another kind)."""
    try:
        if filename.endswith(".tar.gz"):
            return parse_sdist_filename(filename)[1], "sdist"
        _, version, _, tags = parse_wheel_filename(filename)
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return None, ""
    for platform in PLATFORMS:
        if any(t.abi == "abi3" and "linux" in t.platform and t.platform.endswith(platform) for t in tags):
            return version, platform
    return version, ""


def _artifact(http: httpx.Client, row: index.IndexFile) -> Artifact:
    if not row.sha256:
        raise FetchFailed(
            f"{index.shown(index.index_url())} does not tell the sha256 of {row.filename}",
            fix="set VLLM_SERIES_INDEX to an index that does, such as https://pypi.org/simple",
        )
    size = row.size
    if not size:
        try:
            size = int(http.head(row.url, headers={"Accept-Encoding": "identity"}).headers["content-length"])
        except (httpx.HTTPError, KeyError, ValueError) as err:
            raise FetchFailed(f"cannot learn the size of {row.filename}", fix="try another index") from err
    return Artifact(row.filename, row.sha256, size)


def compare(wheel: Path, files: dict[str, bytes]) -> int:
    """Return how many files of the wheel's ``vllm/`` are byte-equal to the sdist's.

    Raises:
        IntegrityError: one differs, or there is nothing to compare.
    """
    equal, wrong = 0, []
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.startswith("vllm/") or name == sdist.VERSION_FILE or name not in files:
                    continue
                if archive.read(name) == files[name]:
                    equal += 1
                else:
                    wrong.append(name)
    except zipfile.BadZipFile as err:
        raise IntegrityError(f"{wheel.name} is not a readable wheel: {err}", fix="fetch it again") from err
    if wrong or not equal:
        raise IntegrityError(
            f"{wheel.name}: {len(wrong)} files differ from the sdist "
            f"({', '.join(wrong[:5])}), {equal} are equal",
            fix="take another release: a wheel that was not built from its sdist cannot be repacked",
        )
    say(f"{wheel.name}: {equal} files of vllm/ are as in the sdist")
    return equal


def _torch(files: dict[str, bytes], name: str) -> str:
    for path in _TORCH_FILES:
        found = _TORCH.search(files.get(path, b"").decode("utf-8", "replace"))
        if found:
            return found[1]
    raise IntegrityError(f"{name}: no torch pin in {', '.join(_TORCH_FILES)}", fix="write the pin by hand")


def _deepgemm(files: dict[str, bytes], name: str) -> tuple[str, str]:
    text = files.get(_DEEPGEMM_FILE, b"").decode("utf-8", "replace")
    repository, tag = _REPOSITORY.search(text), _TAG.search(text)
    if not repository or not tag:
        raise IntegrityError(f"{name}: no DeepGEMM commit in {_DEEPGEMM_FILE}", fix="write the pin by hand")
    return repository[1], tag[1]


def render(pin: Pin, tree: str) -> str:
    """Return the text of a pin file, with its comments."""
    doc = tomlkit.document()
    doc.add(tomlkit.comment("One upstream release that the series is carried on; made by `series pin add`."))
    doc.add("schema", tomlkit.item(pins.SCHEMA))
    doc.add("line", tomlkit.item(pin.line))
    doc.add("role", tomlkit.item(pin.role))
    dsa = tomlkit.item(pin.dsa)
    dsa.comment("n of the wheel version <upstream>+dsa.<n>; raised by a release")
    doc.add("dsa", dsa)
    doc.add(tomlkit.nl())
    source = tomlkit.table()
    source.add("version", pin.version)
    commit = tomlkit.item(pin.source.commit)
    commit.comment("must be the commit id in the sdist's vllm/_version.py")
    source.add("commit", commit)
    made = tomlkit.item(tree)
    made.comment("git tree id of the deterministic import")
    source.add("tree", made)
    source.add("sdist", _rows(pin.source.sdist))
    doc.add("source", source)
    wheels = tomlkit.aot()
    for platform, wheel in pin.wheels.items():
        table = tomlkit.table()
        table.add("platform", platform)
        for key, value in _rows(wheel).items():
            table.add(key, value)
        wheels.append(table)
    doc.add("wheel", wheels)
    torch, deepgemm = tomlkit.table(), tomlkit.table()
    torch.add("version", pin.torch)
    deepgemm.add("repository", pin.deepgemm_repository)
    deepgemm.add("commit", pin.deepgemm_commit)
    doc.add("torch", torch)
    doc.add("deepgemm", deepgemm)
    return re.sub(r"\n+(?=\[(?!source\.))", "\n\n", tomlkit.dumps(doc))


def _rows(artifact: Artifact) -> Table:
    table = tomlkit.table()
    table.add("filename", artifact.filename)
    table.add("sha256", artifact.sha256)
    table.add("size", artifact.size)
    return table
