"""Pins: which upstream release a line is carried on, with the hashes of everything that is fetched for it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_series.errors import CheckFailed, UsageError
from vllm_series.workspace import Workspace

SCHEMA = 1
ROLES = ("current", "compiled", "candidate", "retired")
_LINE = re.compile(r"^[0-9A-Za-z][0-9A-Za-z._+-]*$")


@dataclass(frozen=True)
class Artifact:
    """One file of the package index, known by its bytes."""

    filename: str
    sha256: str
    size: int  # bytes
    project: str = "vllm"


@dataclass(frozen=True)
class Source:
    """The upstream source: ``commit`` is an abbreviated id, ``tree`` the git tree of the import ('' if
    unknown)."""

    version: str
    commit: str
    tree: str
    sdist: Artifact


@dataclass(frozen=True)
class Pin:
    """One ``pins/<line>.toml``."""

    line: str
    role: str
    dsa: int
    source: Source
    wheels: dict[str, Artifact]  # platform ("x86_64", "aarch64") -> wheel
    torch: str
    deepgemm_repository: str
    deepgemm_commit: str
    path: Path

    @property
    def version(self) -> str:
        """Version of upstream, for example ``0.33.0``."""
        return self.source.version

    @property
    def wheel_version(self) -> str:
        """Version of our wheel, for example ``0.33.0+dsa.1``."""
        return f"{self.source.version}+dsa.{self.dsa}"

    @property
    def artifacts(self) -> list[Artifact]:
        return [self.source.sdist, *self.wheels.values()]


class _Reader:
    """Takes typed values out of a TOML table and names the place of what is wrong."""

    def __init__(self, path: Path, data: dict[str, Any], where: str = "") -> None:
        self.path, self.data, self.where = path, data, where

    def fail(self, key: str, what: str) -> CheckFailed:
        return CheckFailed(
            f"{self.path.name}: {self.where}{key} {what}",
            fix=f"correct pins/{self.path.name} (docs/patches.md)",
        )

    def text(self, key: str, pattern: str | None = None, *, empty: bool = False) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "must be a string")
        if value == "" and empty:
            return value
        if value == "" or (pattern is not None and not re.fullmatch(pattern, value)):
            raise self.fail(key, f"is {value!r}" + (f", expected to match {pattern}" if pattern else ""))
        return value

    def number(self, key: str, least: int) -> int:
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fail(key, f"must be a whole number of at least {least}")
        return value

    def table(self, key: str) -> _Reader:
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "must be a table")
        return _Reader(self.path, value, f"{self.where}{key}.")

    def tables(self, key: str) -> list[_Reader]:
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.fail(key, "must be an array of tables")
        return [_Reader(self.path, one, f"{self.where}{key}[{n}].") for n, one in enumerate(value)]

    def artifact(self) -> Artifact:
        return Artifact(
            filename=self.text("filename", r"[A-Za-z0-9][A-Za-z0-9._+-]*"),
            sha256=self.text("sha256", r"[0-9a-f]{64}"),
            size=self.number("size", 1),
        )


def lines(ws: Workspace) -> list[str]:
    """Return the names of all lines, newest version first."""
    from packaging.version import InvalidVersion, Version

    def order(name: str) -> tuple[int, Any]:
        try:
            return (1, Version(name))
        except InvalidVersion:
            return (0, name)

    return sorted((p.stem for p in ws.pins.glob("*.toml")), key=order, reverse=True)


def load_pin(ws: Workspace, line: str) -> Pin:
    """Read and validate one pin.

    Raises:
        UsageError: there is no such line.
        CheckFailed: the file is not valid.
    """
    path = ws.pins / f"{line}.toml"
    if not _LINE.match(line) or not path.is_file():
        raise UsageError(
            f"unknown line {line!r}; the lines are: {', '.join(lines(ws)) or 'none'}",
            fix="name one of them, or add one with `series pin add VERSION`",
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise CheckFailed(f"{path.name} is not valid TOML: {err}", fix=f"correct pins/{path.name}") from err
    return _parse(path, data)


def _parse(path: Path, data: dict[str, Any]) -> Pin:
    top = _Reader(path, data)
    if top.number("schema", 1) != SCHEMA:
        raise top.fail("schema", f"is {data['schema']}, this tool reads {SCHEMA}")
    if top.text("line") != path.stem:
        raise top.fail("line", f"is {data['line']!r} but the file is called {path.name}")
    source = top.table("source")
    wheels: dict[str, Artifact] = {}
    for row in top.tables("wheel"):
        platform = row.text("platform", r"[a-z0-9_]+")
        if platform in wheels:
            raise row.fail("platform", f"{platform!r} is there twice")
        wheels[platform] = row.artifact()
    deepgemm = top.table("deepgemm")
    return Pin(
        line=path.stem,
        role=top.text("role", "|".join(ROLES)),
        dsa=top.number("dsa", 1),
        source=Source(
            version=source.text("version"),
            commit=source.text("commit", r"[0-9a-f]{7,40}"),
            tree=source.text("tree", r"[0-9a-f]{40}", empty=True),
            sdist=source.table("sdist").artifact(),
        ),
        wheels=wheels,
        torch=top.table("torch").text("version"),
        deepgemm_repository=deepgemm.text("repository", r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+"),
        deepgemm_commit=deepgemm.text("commit", r"[0-9a-f]{7,40}"),
        path=path,
    )


def wheel_of(pin: Pin, platform: str) -> Artifact:
    """Return the pinned upstream wheel of a platform.

    Raises:
        UsageError: the line has no wheel for it.
    """
    if platform not in pin.wheels:
        raise UsageError(
            f"line {pin.line} has no {platform} wheel; it has: {', '.join(pin.wheels) or 'none'}",
            fix="name one of these platforms, or build from source",
        )
    return pin.wheels[platform]
