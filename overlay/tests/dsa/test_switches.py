# SPDX-License-Identifier: Apache-2.0
"""The switches in vllm/envs.py: types, defaults, errors, master switch, compile-cache key."""

import typing

import pytest
import vllm.envs as envs
from vllm.config.utils import hash_factors
from vllm.dsa import features, switches
from vllm.platforms import current_platform

DEFAULTS = {
    "VLLM_DSA": True,
    "VLLM_DISABLE_INDEXER_STREAM": False,
    "VLLM_INDEXER_OVERLAP": "auto",
    "VLLM_LITETOPK": False,
    "VLLM_LITEDSA": False,
    "VLLM_DSA_FUSED_Q": "auto",
    "VLLM_INDEXER_LOGITS_SLAB": "auto",
}
OFF = {
    "VLLM_DSA": False,
    "VLLM_DISABLE_INDEXER_STREAM": True,
    "VLLM_INDEXER_OVERLAP": "off",
    "VLLM_LITETOPK": False,
    "VLLM_LITEDSA": False,
    "VLLM_DSA_FUSED_Q": "off",
    "VLLM_INDEXER_LOGITS_SLAB": "off",
}
# A value that changes each switch, and what it then reads.
CHANGED = {
    "VLLM_DISABLE_INDEXER_STREAM": ("1", True),
    "VLLM_INDEXER_OVERLAP": ("native", "native"),
    "VLLM_LITETOPK": ("1", True),
    "VLLM_LITEDSA": ("1", True),
    "VLLM_DSA_FUSED_Q": ("off", "off"),
    "VLLM_INDEXER_LOGITS_SLAB": ("off", "off"),
}
IN_CACHE_KEY = {"VLLM_DSA", "VLLM_DISABLE_INDEXER_STREAM", "VLLM_INDEXER_OVERLAP", "VLLM_DSA_FUSED_Q"}


def ours(factors: dict[str, object]) -> set[str]:
    return set(factors) & set(features.all_switches())


def test_every_switch_of_every_feature_is_registered():
    assert set(DEFAULTS) <= set(features.all_switches())
    assert set(features.all_switches()) <= set(envs.environment_variables)


def test_defaults_and_declared_types():
    """The stubs at the top of envs.py say what a type checker sees; they must match what is read."""
    declared = _declared()
    for name, default in DEFAULTS.items():
        value = switches.get(name)
        assert value == default and type(value) is type(default), name
        assert declared[name][1] == default, name
        hint = declared[name][0]
        assert hint == "bool" or repr(default)[1:-1] in hint, (name, hint)


def _declared() -> dict[str, tuple[str, object]]:
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(envs))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {
        node.target.id: (ast.unparse(node.annotation), ast.literal_eval(node.value))
        for node in block.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id in DEFAULTS
        and node.value is not None
    }


@pytest.mark.parametrize("name", CHANGED)
def test_a_switch_is_read_when_used(name: str, monkeypatch: pytest.MonkeyPatch):
    text, value = CHANGED[name]
    monkeypatch.setenv(name, text)
    assert switches.get(name) == value
    assert {other: switches.get(other) for other in DEFAULTS if other != name} == {
        other: default for other, default in DEFAULTS.items() if other != name
    }


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("text", ["", "2", "AUTO", "yes"])
def test_a_wrong_value_is_the_error_of_env_with_choices(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"Invalid value '{text}' for {name}\. Valid options: \["):
        switches.get(name)


def test_master_switch_turns_all_off_and_validates_nothing(monkeypatch: pytest.MonkeyPatch):
    for name, (text, _) in CHANGED.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("VLLM_INDEXER_OVERLAP", "no such mode")
    monkeypatch.setenv("VLLM_LITETOPK", "maybe")
    monkeypatch.setenv("VLLM_DSA", "0")
    assert {name: switches.get(name) for name in OFF} == OFF
    envs.enable_envs_cache()  # reads every variable: must not raise
    assert {name: switches.get(name) for name in OFF} == OFF


def test_unknown_switch_says_that_the_patches_are_missing():
    with pytest.raises(switches.SwitchesMissing, match="VLLM_NO_SUCH_SWITCH"):
        switches.get("VLLM_NO_SUCH_SWITCH")


@pytest.mark.parametrize("master", ["0", "1"])
def test_upstream_accepts_the_variables(master: str, monkeypatch: pytest.MonkeyPatch):
    import os

    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        if name not in envs.environment_variables:
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_DSA", master)
    for name, (text, _) in CHANGED.items():
        monkeypatch.setenv(name, text)
    # 0.33.0 asks the platform, 0.28.0 has it in envs.py.
    validate = getattr(envs, "validate_environ", None) or current_platform.validate_environ
    validate(True)
    monkeypatch.setenv("VLLM_LITETOPKK", "1")
    with pytest.raises(ValueError, match="VLLM_LITETOPKK"):
        validate(True)


def test_only_switches_that_change_compiled_code_are_in_the_cache_key(monkeypatch: pytest.MonkeyPatch):
    assert ours(envs.compile_factors()) == IN_CACHE_KEY
    before = hash_factors(envs.compile_factors())
    for name, (text, _) in CHANGED.items():
        monkeypatch.setenv(name, text)
        changed = hash_factors(envs.compile_factors()) != before
        assert changed == (name in IN_CACHE_KEY), name
        monkeypatch.delenv(name)


def test_cache_key_with_the_master_switch_off_is_upstreams(monkeypatch: pytest.MonkeyPatch):
    on = envs.compile_factors()
    monkeypatch.setenv("VLLM_DSA", "0")
    for name, (text, _) in CHANGED.items():
        monkeypatch.setenv(name, text)
    off = envs.compile_factors()
    assert ours(off) == set()
    assert off == {name: value for name, value in on.items() if name not in IN_CACHE_KEY}


def test_snapshot_keeps_errors_as_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_LITEDSA", "x")
    shot = switches.snapshot(["VLLM_LITEDSA", "VLLM_LITETOPK"])
    assert shot["VLLM_LITETOPK"] is False
    assert "Invalid value 'x' for VLLM_LITEDSA" in shot["VLLM_LITEDSA"]["error"]


def test_enumerations_list_the_same_choices_in_stub_and_reader():
    for name, (hint, _) in _declared().items():
        if hint == "bool":
            continue
        choices = typing.get_args(eval(hint, {"Literal": typing.Literal}))
        with pytest.MonkeyPatch.context() as patch:
            for choice in choices:
                patch.setenv(name, choice)
                assert switches.get(name) == choice
            patch.setenv(name, "?")
            with pytest.raises(ValueError) as error:
                switches.get(name)
            assert str(list(choices)) in str(error.value)
