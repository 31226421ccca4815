"""The series file and patch mails."""

from __future__ import annotations

import pytest
from core_lab import Project

from vllm_series import series
from vllm_series.errors import CheckFailed

MAIL = b"""From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A B <a@b>
Date: Sun, 29 Nov 2026 16:00:00 +0000
Subject: [PATCH] [dsa] A subject that is so long that the mail folds it over
 two lines
X-Odd: kept as it is

Why it is there.

Feature: core
Anchor: a.py::f
anchor: a.py::g

diff --git a/a.py b/a.py
index 1111111..2222222 100644
--- a/a.py
+++ b/a.py
@@ -1,2 +1,3 @@ def f
 x
+y
 z
"""


def test_mail_is_read() -> None:
    patch = series.parse("a.patch", MAIL)
    assert patch.subject == "[dsa] A subject that is so long that the mail folds it over two lines"
    assert patch.author == "A B <a@b>"
    assert patch.get("Anchor") == ["a.py::f", "a.py::g"]
    assert patch.get("Feature") == ["core"]
    assert patch.paths == ["a.py"]
    assert patch.body.startswith("Why it is there.")


def test_effect_ignores_blob_ids_line_numbers_and_headings_alone() -> None:
    moved = MAIL.replace(b"@@ -1,2 +1,3 @@ def f", b"@@ -9,2 +19,3 @@ def g").replace(
        b"1111111..2222222", b"3..4"
    )
    assert series.effect(moved) == series.effect(MAIL)
    assert series.effect(MAIL.replace(b"+y", b"+Y")) != series.effect(MAIL)
    assert series.effect(MAIL.replace(b" z", b" Z")) != series.effect(MAIL)
    assert series.effect(MAIL.replace(b"@@ -1,2 +1,3", b"@@ -1,2 +1,4")) != series.effect(MAIL)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"diff --git a/a b/a\n", "not a git patch mail"),
        (MAIL.split(b"diff --git")[0], "not a git patch mail"),
        (MAIL + MAIL, "more than one mail"),
        (MAIL.replace(b"Subject:", b"X-Subject:"), "no subject"),
    ],
)
def test_not_a_mail(data: bytes, message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        series.parse("a.patch", data)


def _write(project: Project, text: str, *files: str) -> None:
    (project.patches / "series").write_text(text)
    for name in files:
        (project.patches / name).write_bytes(MAIL)


def test_missing_from_the_folder(bare: Project) -> None:
    _write(bare, "# c\na.patch\nb.patch\n", "a.patch")
    with pytest.raises(CheckFailed, match=r"names files that are not there: b\.patch"):
        series.load(bare.ws, "0.9.0")


def test_missing_from_the_series(bare: Project) -> None:
    _write(bare, "a.patch\n", "a.patch", "b.patch")
    with pytest.raises(CheckFailed, match=r"series does not name: b\.patch"):
        series.load(bare.ws, "0.9.0")


def test_twice_in_the_series(bare: Project) -> None:
    _write(bare, "a.patch\n\n# again\na.patch\n", "a.patch")
    with pytest.raises(CheckFailed, match=r"series:4: a.patch is there twice"):
        series.load(bare.ws, "0.9.0")


@pytest.mark.parametrize("name", ["../a.patch", "A.patch", "a.diff", "a b.patch", "/x.patch"])
def test_malformed_entry(bare: Project, name: str) -> None:
    _write(bare, f"{name}\n")
    with pytest.raises(CheckFailed, match="not a patch file name"):
        series.load(bare.ws, "0.9.0")


def test_each_of_them_stops_apply_with_exit_1(project: Project) -> None:
    for text, files in (("a.patch\n", ()), ("", ("a.patch",)), ("a.patch\na.patch\n", ("a.patch",))):
        _write(project, text, *files)
        assert "fix:" in project.series("apply", "0.9.0", code=1).err
        assert project.state() == "ABSENT"


def test_series_file_missing(bare: Project) -> None:
    (bare.patches / "series").unlink()
    with pytest.raises(CheckFailed, match="series is missing"):
        series.load(bare.ws, "0.9.0")
