"""What a machine may look like: an old Python 3.11, a proxy that re-signs, a wrong call."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import ssl
import subprocess
import tarfile
import threading
from pathlib import Path

import click
import pytest
from core_lab import FILES, Project, make_sdist

from vllm_series import cli
from vllm_series import index as indexing
from vllm_series.files import unpack_git_archive
from vllm_series.git import Git

ROOT = Path(__file__).resolve().parents[2]


def test_archives_unpack_on_python_3_11_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's Python has no ``filter`` argument; one test run there would have shown it."""
    real = tarfile.TarFile.extractall

    def as_in_3_11_2(self, path=".", members=None, *, numeric_owner=False):  # type: ignore[no-untyped-def]
        real(self, path, members, numeric_owner=numeric_owner)

    monkeypatch.setattr(tarfile.TarFile, "extractall", as_in_3_11_2)
    repo = tmp_path / "repo"
    repo.mkdir()
    git = Git(repo)
    git.run("init", "-q")
    (repo / "a.sh").write_text("#!/bin/sh\n")
    (repo / "a.sh").chmod(0o755)
    (repo / "link").symlink_to("a.sh")
    git.run("add", ".")
    git.run("commit", "-qm", "one")
    packed = tmp_path / "tree.tar"
    git.run("archive", "--format=tar", "-o", str(packed), "HEAD")
    unpack_git_archive(packed, tmp_path / "out")
    assert (tmp_path / "out" / "a.sh").stat().st_mode & 0o111
    assert (tmp_path / "out" / "link").readlink() == Path("a.sh")


def test_the_certificates_of_the_machine_are_trusted() -> None:
    ours = {row["serialNumber"] for row in indexing.trusted().get_ca_certs()}
    machine = {row["serialNumber"] for row in ssl.create_default_context().get_ca_certs()}
    assert machine <= ours


def test_a_certificate_that_does_not_check_is_named_as_the_cause(
    bare: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = tmp_path / "server.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", pem, "-out", f"{pem}.crt"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{pem}.crt", pem)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("VLLM_SERIES_INDEX", f"https://localhost:{server.server_port}/simple")
    try:
        result = bare.series("fetch", "0.9.0", code=6)
    finally:
        server.shutdown()
        server.server_close()
    assert "certificate of localhost cannot be checked" in result.err
    assert "ca-certificates" in result.err


@pytest.mark.parametrize(
    "call", [("bogus",), ("lint", "--bogus"), ("apply",), ("wheel", "--bad"), ("kernels", "info", "/none")]
)
def test_a_wrong_call_is_json_too(bare: Project, call: tuple[str, ...]) -> None:
    said = bare.series(*call, "--json", code=2)
    answer = json.loads(said.out)
    assert answer["exit_code"] == 2
    assert answer["error"]
    assert "--help" in answer["fix"]
    assert "Error:" in said.err


@pytest.mark.parametrize("command", ["status", "apply", "export"])
def test_missing_git_is_named(project: Project, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Every command, not only the first apply, says what is missing; a tree is there already."""
    project.apply()
    monkeypatch.setenv("PATH", "/nowhere")
    said = project.series(command, project.line, code=2)
    assert "git is not installed" in said.err
    assert "apt-get install git" in said.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("half", ["import", "checkout"])
def test_a_disk_that_is_really_full(project: Project, tmp_path: Path, half: str) -> None:
    """git words a full disk in several ways; a monkeypatched error shows none of them."""
    noise = "".join(hashlib.sha256(str(n).encode()).hexdigest() for n in range(60000))
    project.write_pin(
        make_sdist(project.files, files={**FILES, **{f"d{n}.txt": f"{n}{noise}" for n in range(3)}})
    )
    project.fetch()
    project.lock_import()
    project.series("lock", project.line)
    small = project.root / ("build" if half == "checkout" else ".work")
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "none", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        said = project.series("apply", project.line, code=6)
        assert "no space left" in said.err
        assert "fix: free some space" in said.err
        subprocess.run(["mount", "-o", "remount,size=100m", small], check=True)
        project.apply()
        assert project.state() == "APPLIED"
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only folder needs root")
def test_a_checkout_that_cannot_be_written(project: Project) -> None:
    shutil.rmtree(project.root / ".work")
    (project.root / ".work").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", project.root / ".work"]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        said = project.series("apply", project.line, "--json", code=6)
    finally:
        subprocess.run(["umount", "-l", project.root / ".work"], check=True)
    assert "Read-only file system" in said.json["error"]
    assert "permissions" in said.json["fix"]


def test_an_environment_that_fails_fails_its_stage() -> None:
    """`scripts/test.sh`: not only the last line's outcome counts."""
    script = (ROOT / "scripts" / "test.sh").read_text()
    body = script[script.index("run_envs() {") :].split("\n}\n")[0] + "\n}\n"
    fake = "series_lines() { echo 0.28.0 0.33.0; }; series() { [ $3 = 0.33.0 ] || return 6; }\n"
    done = subprocess.run(["bash", "-c", fake + body + "run_envs"], check=False)
    assert done.returncode == 6


def test_every_command_of_the_series_speaks_json() -> None:
    cli._register_areas(cli.cli)
    found = {
        name
        for name, command in cli.cli.commands.items()
        if any("--json" in option.opts for option in command.params)
    }
    assert {"fetch", "status", "apply", "export", "lock", "verify", "lint", "wheel", "rebase"} <= found
    pin = cli.cli.commands["pin"]
    assert isinstance(pin, click.Group)
    assert all(any("--json" in option.opts for option in one.params) for one in pin.commands.values())
