"""`atomrl doctor --engine`: packages that are missing, old or broken, and models that an engine does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atomrl.cli.main import main
from tests.engines.fake_sglang import FakeSGLang
from tests.tiny import make_tiny_model


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Installs a package of a name, for this process and those that it starts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def install(name: str, source: str, version: str, requires: list[str]) -> None:
        files = [name, f"{name}-{version}.dist-info"]
        for folder in files:
            (tmp_path / folder).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (tmp_path / files[1] / "METADATA").write_text(
            "\n".join([*lines, *(f"Requires-Dist: {need}" for need in requires), "", ""])
        )
        (tmp_path / files[1] / "top_level.txt").write_text(name)
        (tmp_path / files[1] / "RECORD").write_text(f"{name}/__init__.py,,\n")

    return install


def config(tmp_path: Path, engine: str, **rollout) -> str:
    folder = make_tiny_model(tmp_path / "model")
    data = {"train": "arithmetic", "eval": None}
    tree = {"run_name": "x", "model": {"path": str(folder)}, "data": data, "rollout": {"engine": engine, **rollout}}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tree))
    return str(path)


def test_an_engine_that_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {})
    assert main(["doctor", "--engine", "sglang"]) == 1
    printed = capsys.readouterr().out
    assert "broken: not installed (pip install 'atomrl[sglang]')" in printed and "torch 2" in printed


def test_requirements_of_a_package_are_named_with_their_version(site, capsys):
    archs = "class ModelRegistry:\n    get_supported_archs = staticmethod(lambda: ['LlamaForCausalLM'])\n"
    site("vllm", archs, "0.32.0", ["torch==1.0", "no-such-package>=2", "pytest", "never; extra == 'gpu'"])
    assert main(["doctor", "--engine", "vllm-server"]) == 0  # the import decides
    printed = capsys.readouterr().out
    assert "0.32.0 (vllm)" in printed and "but vllm requires ==1.0" in printed
    assert "missing: vllm requires it (pip install 'no-such-package>=2')" in printed
    assert "pytest" not in printed and "never" not in printed
    assert "works; supports 1 architectures" in printed


def test_a_package_that_cannot_be_imported(site, capsys):
    site("vllm", "raise ImportError('libcudart.so.13: cannot open shared object file')", "0.32.0", [])
    assert main(["doctor", "--engine", "vllm"]) == 1
    assert "broken: ImportError: libcudart.so.13: cannot open shared object file" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_sglang_is_told_that_there_is_no_gpu(site, capsys):
    """Without that it cannot even be imported."""
    source = (
        "import os, sys, types\n"
        "if os.environ.get('SGLANG_USE_CPU_ENGINE') != '1': raise ImportError('no accelerator')\n"
        "names = ['srt', 'srt.entrypoints', 'srt.entrypoints.http_server', 'srt.models', 'srt.models.registry']\n"
        "sys.modules |= {f'sglang.{name}': types.ModuleType(name) for name in names}\n"
        "class ModelRegistry:\n    get_supported_archs = staticmethod(lambda: ['LlamaForCausalLM'])\n"
        "sys.modules['sglang.srt.models.registry'].ModelRegistry = ModelRegistry\n"
    )
    site("sglang", source, "0.5.23", [])
    assert main(["doctor", "--engine", "sglang"]) == 0
    assert "works; supports 1 architectures" in capsys.readouterr().out


@pytest.mark.parametrize(("arch", "status"), [("LlamaForCausalLM", 0), ("OtherForCausalLM", 1)])
def test_the_model_of_a_config(site, capsys, tmp_path, arch, status):
    archs = f"class ModelRegistry:\n    get_supported_archs = staticmethod(lambda: ['{arch}'])\n"
    site("vllm", archs, "0.32.0", [])
    assert main(["doctor", "--engine", "vllm", config(tmp_path, "vllm")]) == status
    assert ("LlamaForCausalLM, which it does not support" in capsys.readouterr().out) == bool(status)


def test_the_servers_of_a_config(capsys, tmp_path):
    fake = FakeSGLang(str(make_tiny_model(tmp_path / "served")))
    path = config(tmp_path, "sglang", server=fake.url)
    assert main(["doctor", "--engine", "sglang", path]) == 0
    assert f"{fake.url}/health: ok" in capsys.readouterr().out
    fake.close()
    assert main(["doctor", "--engine", "sglang", path]) == 1
    assert "broken" in capsys.readouterr().out


def test_our_own_engines(capsys, tmp_path):
    assert main(["doctor", "--engine", "native", config(tmp_path, "native")]) == 0
    assert "is supported" in capsys.readouterr().out
    config_file = make_tiny_model(tmp_path / "model") / "config.json"
    config_file.write_text(config_file.read_text().replace('"silu"', '"gelu"'))
    assert main(["doctor", "--engine", "native", str(tmp_path / "config.yaml")]) == 0
    assert "hidden_act 'gelu' is not silu; hf is used instead" in capsys.readouterr().out
    assert main(["doctor", "--engine", "other"]) == 2
    assert "valid: native, hf, vllm, vllm-server, sglang" in capsys.readouterr().err
