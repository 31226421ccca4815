"""Decides which members a repacked wheel has, and refuses what a repack cannot carry."""

from __future__ import annotations

import zlib

from vllm_series.errors import CheckFailed, IntegrityError
from vllm_series.wheel import metadata, provenance, record, sbom
from vllm_series.wheel.archive import Copied, Member, Source, Stored
from vllm_series.wheel.recipe import Recipe

KERNEL_LIBRARY = "vllm/_dsa_C.so"
VERSION_MODULE = "vllm/_version.py"
#: What upstream's build compiled or read: a changed file there is not in the wheel that is repacked.
BUILD_PATHS = ("csrc/", "cmake/", "rust/", "requirements/")
BUILD_FILES = frozenset(
    {
        "CMakeLists.txt",
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "rust-toolchain.toml",
        "use_existing_torch.py",
    }
)
#: Inside the package, files from which upstream's build generates others.
BUILD_SUFFIXES = (".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".rs", ".proto", ".so")


def needs_source_build(path: str) -> bool:
    """Whether a change of this upstream file only takes effect in a build from source."""
    in_package = path.startswith("vllm/") and path.endswith(BUILD_SUFFIXES)
    return path in BUILD_FILES or path.startswith(BUILD_PATHS) or in_package


def _by(recipe: Recipe, path: str) -> str:
    names = [patch.name for patch in recipe.patches if path in patch.paths]
    return ", ".join(names) or "the series"


def refuse_what_was_compiled(recipe: Recipe) -> None:
    """Refuse a series that changes what upstream compiled, except in patches that say so themselves.

    A patch with the trailer ``Wheel: source-only`` is meant for source builds; a repacked wheel goes without
    its effect, and the provenance carries the trailer.

    Raises:
        CheckFailed: names the first such file and the patch that changes it.
    """
    excused = {path for patch in recipe.patches if patch.source_only for path in patch.paths}
    for path in sorted(recipe.changed):
        if needs_source_build(path) and path not in excused:
            raise CheckFailed(
                f"{path} is changed by {_by(recipe, path)}, but upstream's wheel was built without it",
                fix="build from source, take the patch out of the series, or, if a wheel may go without it, "
                "give it the trailer `Wheel: source-only [reason]`",
            )


def check_wheel_is_source(recipe: Recipe, source: Source, rows: dict[str, record.Row]) -> None:
    """Prove that the wheel's ``vllm/**`` has each file of the imported source, byte for byte.

    Raises:
        IntegrityError: names the first file that is missing or differs.
    """
    paths = sorted(path for path in recipe.base_blobs if path.startswith("vllm/"))
    blobs = recipe.read_base([recipe.base_blobs[path] for path in paths])
    for path, data in zip(paths, blobs, strict=True):
        info = source.members.get(path)
        what = ""
        if info is None or path not in rows:
            what = "is missing from it"
        elif record.row_of(data) != rows[path] or (zlib.crc32(data), len(data)) != (info.CRC, info.file_size):
            what = "has other bytes in it"
        if what:
            raise IntegrityError(
                f"{source.path.name} is not built from {recipe.pin.source.sdist.filename}: {path} {what}",
                fix=f"correct pins/{recipe.pin.line}.toml so that sdist and wheel belong together",
            )


def _python_changes(recipe: Recipe, source: Source) -> dict[str, bytes | None]:
    """The package files that patches and overlay give, with None for deleted ones.

    Raises:
        CheckFailed: a file is in upstream's wheel but not in its source, or an overlay file shadows upstream.
    """
    changes: dict[str, bytes | None] = {
        path: data
        for path, data in recipe.changed.items()
        if path.startswith("vllm/") and not needs_source_build(path)
    }
    for path in changes:
        if path in source.members and path not in recipe.base_blobs:
            raise CheckFailed(
                f"{path} is changed by {_by(recipe, path)}, but upstream's build generates it",
                fix="change what it is generated from, or hook in elsewhere",
            )
    for path, data in recipe.packaged_overlay.items():
        if path in source.members or path in changes:
            raise CheckFailed(
                f"overlay/{path} shadows a file of upstream's wheel",
                fix="rename the overlay file, or make the change a patch",
            )
        changes[path] = data
    return changes


def members(recipe: Recipe, source: Source) -> list[Member]:
    """Return the new wheel's members in order: package sorted, ``.dist-info`` after it, RECORD last.

    Raises:
        CheckFailed: the series cannot be repacked (see ``refuse_what_was_compiled``) or a path collides.
        IntegrityError: the wheel does not belong to the source, or its RECORD does not describe it.
    """
    refuse_what_was_compiled(recipe)
    old, new = recipe.upstream_name.dist_info, recipe.name.dist_info
    rows = record.parse(source.read(f"{old}/RECORD"))
    if set(rows) != set(source.members) - {f"{old}/RECORD"}:
        odd = sorted(set(rows) ^ (set(source.members) - {f"{old}/RECORD"}))[0]
        raise IntegrityError(f"{source.path.name}: RECORD and the archive disagree about {odd}")
    check_wheel_is_source(recipe, source, rows)

    version = recipe.pin.wheel_version
    replaced = _python_changes(recipe, source)
    replaced[VERSION_MODULE] = metadata.set_module_version(
        source.read(VERSION_MODULE), recipe.pin.version, version
    )
    replaced[f"{old}/METADATA"] = metadata.set_metadata_version(
        source.read(f"{old}/METADATA"), recipe.pin.version, version
    )
    replaced[f"{old}/WHEEL"] = metadata.render_wheel_file(
        source.read(f"{old}/WHEEL"), recipe.name, recipe.generator
    )
    for path, data in recipe.deepgemm.files.items() if recipe.deepgemm else ():
        if path not in source.members or path in replaced:
            raise CheckFailed(f"{path} is no file of upstream's wheel that a built DeepGEMM can replace")
        replaced[path] = data
    added: dict[str, Stored] = {}
    for path, data in (
        (provenance.PATH, provenance.render(provenance.record(recipe))),
        (f"{new}/sboms/{sbom.FILENAME}", sbom.render(recipe)),
    ):
        added[path] = Stored(path, data)
    if recipe.kernels:
        added[KERNEL_LIBRARY] = Stored(KERNEL_LIBRARY, recipe.kernels.data, 0o100755)
    for path in added:
        if path in source.members or path in replaced:
            raise CheckFailed(f"{path} is written by the repack, but it is already there", fix="rename it")

    result: dict[str, Member] = {}
    new_rows: dict[str, record.Row] = {}
    for name, info in source.members.items():
        if name == f"{old}/RECORD" or name in replaced:
            continue
        renamed = new + name.removeprefix(old) if name.startswith(f"{old}/") else name
        result[renamed] = Copied(renamed, info)
        new_rows[renamed] = rows[name]
    for name, content in replaced.items():
        if content is not None:
            renamed = new + name.removeprefix(old) if name.startswith(f"{old}/") else name
            added[renamed] = Stored(renamed, content, 0o100755 if name.endswith(".so") else 0o100644)
    for name, member in added.items():
        result[name] = member
        new_rows[name] = record.row_of(member.data)
    record_name = f"{new}/RECORD"
    ordered = sorted(result, key=lambda name: (name.startswith(f"{new}/"), name))
    return [*(result[name] for name in ordered), Stored(record_name, record.render(new_rows, record_name))]
