"""Probes of Live-When and upstreamed.toml, on small trees and on the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_lab import Project

from vllm_series import importer, probes, upstreamed
from vllm_series.errors import CheckFailed
from vllm_series.pins import load_pin
from vllm_series.trees import Tree
from vllm_series.workspace import Workspace


@pytest.fixture
def tree(project: Project) -> Tree:
    return Tree(importer.odb(project.ws), importer.import_pin(project.ws, project.pin()))


@pytest.mark.parametrize(
    ("probe", "ok", "detail"),
    [
        ("always", True, "always"),
        ("always [each run reads it]", True, "always"),
        ("registry:DeepseekV32ForCausalLM=vllm.models.deepseek_v32", True, "vllm.models.deepseek_v32:Deep"),
        ("registry:DeepseekV32ForCausalLM=vllm.models.deepseek_v32:DeepseekV32ForCausalLM", True, ""),
        ("registry:DeepseekV32ForCausalLM=vllm.models.deepseek_v32:Other", False, "is the class"),
        ("registry:DeepseekV32ForCausalLM=vllm.models.deepseek", False, "not in vllm.models.deepseek"),
        ("registry:OldForCausalLM=vllm.model_executor.models.old", True, ""),
        ("registry:Nope=vllm.model_executor.models.old", False, "does not register Nope"),
        ("import:vllm.models.deepseek_v32>vllm.layers", True, ""),
        ("import:vllm.models>vllm.layers", False, "there is no module vllm.models"),
        ("import:vllm.models.deepseek_v32>vllm.envs", False, "no file of vllm.models.deepseek_v32 imports"),
        ("import:vllm.models.deepseek_v32>vllm.gone", False, "there is no module vllm.gone"),
        ("symbol:vllm/envs.py::Config.forward", True, ""),
        ("symbol:vllm/envs.py::Config.nope", False, "has no Config.nope"),
        ("symbol:vllm/nope.py::x", False, "is not there"),
        (r"text:vllm/envs.py::Config.forward=x \+ 1", True, ""),
        (r"text:vllm/envs.py::Config.backward=x \+ 1", False, "no match"),
        ("text:README.md=upstream", True, ""),
    ],
)
def test_answers(tree: Tree, probe: str, ok: bool, detail: str) -> None:
    answer = probes.ask(tree, probe)
    assert answer.ok is ok, answer.detail
    assert detail in answer.detail


@pytest.mark.parametrize(
    "probe",
    ["sometimes", "registry:A", "import:a", "symbol:a.py", "text:a.py", "text:a.py=(", "always maybe", ""],
)
def test_malformed(tree: Tree, probe: str) -> None:
    assert probes.problem(probe)
    assert not probes.ask(tree, probe).ok


def test_target_that_no_model_runs_any_more_fails_verify(patched: Project) -> None:
    name = "change-forward.patch"
    text = (patched.patches / name).read_text()
    probe = "registry:DeepseekV32ForCausalLM=vllm.model_executor.models.old"
    (patched.patches / name).write_text(text.replace("Live-When: always", f"Live-When: {probe}"))
    patched.series("lock")
    step = {row["name"]: row for row in patched.series("verify", "--json", code=1).json["lines"]["0.9.0"]}[
        "live"
    ]
    assert "DeepseekV32ForCausalLM is vllm.models.deepseek_v32" in step["error"]


ENTRY = """[[upstreamed]]
id = "a"
feature = "core"
origin = "https://example.org/1"
since = "0.8"
proves = "forward adds"
[[upstreamed.probe]]
kind = "text"
file = "vllm/envs.py"
name = "Config.forward"
regex = 'x \\+ 1'
[[upstreamed.probe]]
kind = "symbol"
file = "vllm/envs.py"
name = "Config"
"""


def test_upstreamed_entries(project: Project, tree: Tree) -> None:
    path = project.patches / "upstreamed.toml"
    assert upstreamed.load(project.ws, "0.9.0") == []
    path.write_text(ENTRY)
    assert upstreamed.check(project.ws, "0.9.0", tree) == []
    project.series("verify")
    path.write_text(ENTRY.replace("x \\\\+ 1", "x - 1").replace("x \\+ 1", "x - 1"))
    (problem,) = upstreamed.check(project.ws, "0.9.0", tree)
    assert "no match of 'x - 1' (it proved: forward adds)" in problem
    result = project.series("verify", code=1)
    assert "carry the change as a patch again" in result.out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('kind = "text"', 'kind = "magic"'),
        ('name = "Config"', ""),
        ('since = "0.8"', ""),
        ("regex = 'x \\+ 1'", "regex = '('"),
        ("[[upstreamed]]", "[[upstreamed"),
        ('proves = "forward adds"', 'proves = ""'),
    ],
)
def test_invalid_upstreamed_file(project: Project, old: str, new: str) -> None:
    assert old in ENTRY
    (project.patches / "upstreamed.toml").write_text(ENTRY.replace(old, new))
    with pytest.raises(CheckFailed, match=r"upstreamed\.toml"):
        upstreamed.load(project.ws, "0.9.0")


def test_an_id_twice(project: Project) -> None:
    (project.patches / "upstreamed.toml").write_text(ENTRY + ENTRY)
    with pytest.raises(CheckFailed, match="an id twice"):
        upstreamed.load(project.ws, "0.9.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "probe", "ok"),
    [
        ("0.33.0", "registry:DeepseekV32ForCausalLM=vllm.models.deepseek_v32", True),
        ("0.33.0", "registry:GlmMoeDsaForCausalLM=vllm.models.deepseek_v32:GlmMoeDsaForCausalLM", True),
        ("0.33.0", "registry:DeepseekV32ForCausalLM=vllm.model_executor.models.deepseek_v2", False),
        ("0.28.0", "registry:DeepseekV32ForCausalLM=vllm.model_executor.models.deepseek_v2", True),
        ("0.28.0", "registry:GlmMoeDsaForCausalLM=vllm.model_executor.models.deepseek_v2", True),
        ("0.28.0", "registry:DeepseekV32ForCausalLM=vllm.models.deepseek_v32", False),
        ("0.33.0", "import:vllm.models.deepseek_v32>vllm.model_executor.layers.sparse_attn_indexer", True),
        ("0.33.0", "import:vllm.models.deepseek_v32>vllm.model_executor.layers.mla", False),
        ("0.28.0", "import:vllm.model_executor.models.deepseek_v2>vllm.model_executor.layers.mla", True),
    ],
)
def test_on_the_real_trees(real: Workspace, checkout: Path, line: str, probe: str, ok: bool) -> None:
    """The DSA path moved at 0.29: what is live on one line is dead on the other."""
    shared = Workspace(checkout) if (checkout / ".work/odb.git").is_dir() else real
    base = importer.import_pin(shared, load_pin(shared, line))
    answer = probes.ask(Tree(importer.odb(shared), base), probe)
    assert answer.ok is ok, answer.detail
