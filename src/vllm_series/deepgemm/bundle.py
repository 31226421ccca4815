"""A built extension of a line's patched DeepGEMM: files that take the place of those in upstream's wheel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series.deepgemm.patchfile import DeepGemmPatch
from vllm_series.errors import CheckFailed, UsageError
from vllm_series.files import sha256_of, write_atomic

MANIFEST = "deepgemm.json"
SCHEMA = 1
PACKAGE = "vllm/third_party/deep_gemm/"
#: The name of the op, which each extension must carry.
OP = b"fp8_fp4_mqa_logits_out"


@dataclass(frozen=True)
class Bundle:
    """Files by path in the wheel, and what they were made from (JSON values, no paths of this machine)."""

    files: Mapping[str, bytes]
    record: Mapping[str, Any]


def save(folder: Path, line: str, patch: DeepGemmPatch, made_with: Mapping[str, str]) -> dict[str, Any]:
    """Write the manifest for the built files that lie in ``folder``; returns it.

    Raises:
        CheckFailed: there is no extension, or one without the op.
    """
    data = {file.name: file.read_bytes() for file in sorted(folder.glob("_C*")) if file.is_file()}
    _check_op(data, str(folder))
    record = {
        "schema": SCHEMA,
        "line": line,
        "source": {"repository": patch.what, "commit": patch.id},
        "patch": {"name": patch.file.name, "sha256": patch.digest},
        "made_with": dict(made_with),
        "files": {name: sha256_of(content) for name, content in data.items()},
    }
    write_atomic(folder / MANIFEST, json.dumps(record, indent=2) + "\n")
    return record


def load(folder: Path, line: str, patch: DeepGemmPatch, wheel_members: Iterable[str]) -> Bundle:
    """Read a bundle and prove that it can take the place of what upstream's wheel has.

    Args:
        folder: what `save` wrote.
        line: the line of the wheel.
        patch: the line's.
        wheel_members: names in upstream's wheel. Line 0.28.0 has one extension for each Python version; a
            wheel with some of them patched would behave differently from one Python to the next.

    Raises:
        UsageError: there is no bundle.
        CheckFailed: it is of another line or patch, was changed, or replaces some extensions but not all.
    """
    again = f"series deepgemm build {line}"
    try:
        record = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (folder / name).read_bytes() for name in record["files"]}
    except FileNotFoundError as error:
        raise UsageError(f"{folder} has no built DeepGEMM: {error.filename} is missing", fix=again) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckFailed(f"{folder / MANIFEST} cannot be read: {error}", fix=again) from error
    if record.get("schema") != SCHEMA or record.get("line") != line:
        raise CheckFailed(f"{folder} holds DeepGEMM of line {record.get('line')}, not {line}", fix=again)
    if record["patch"] != {"name": patch.file.name, "sha256": patch.digest}:
        raise CheckFailed(f"{folder} was built with another {patch.file.name}", fix=again)
    for name, data in files.items():
        if sha256_of(data) != record["files"][name]:
            raise CheckFailed(f"{folder / name} was changed after it was built", fix=again)
    _check_op(files, str(folder))
    theirs = {name.removeprefix(PACKAGE) for name in wheel_members if name.startswith(PACKAGE + "_C")}
    if missing := sorted(theirs - set(files)):
        raise CheckFailed(
            f"{folder} lacks {', '.join(missing)}: a wheel gets all extensions of DeepGEMM or none",
            fix=f"{again} with a --python for each version that is missing",
        )
    if extra := sorted(set(files) - theirs):
        raise CheckFailed(f"{folder} has {', '.join(extra)}, which upstream's wheel has not", fix=again)
    return Bundle({PACKAGE + name: data for name, data in sorted(files.items())}, record)


def _check_op(files: Mapping[str, bytes], where: str) -> None:
    libraries = {name: data for name, data in files.items() if name.endswith(".so")}
    if not libraries:
        raise CheckFailed(f"{where} has no extension (_C*.so)", fix="look at the build's output above")
    for name, data in libraries.items():
        if OP not in data:
            raise CheckFailed(
                f"{where}/{name} has no {OP.decode()}: it was not built from a patched source",
                fix="build it with series deepgemm build",
            )
