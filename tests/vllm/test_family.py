"""All classes of the installed vLLM at once, and those of a plugin package that is installed beside it."""

import os
from textwrap import dedent

import pytest

from attncheck.harness.workers.limits import Limit
from attncheck.harness.workers.survey import survey

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

PLUGIN = '''
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def register():
    """What vLLM calls of a general plugin."""
    register_backend(AttentionBackendEnum.CUSTOM, "their_plugin.attention.Custom")
    register_backend("THEIR_ATTN", "their_plugin.attention.Theirs")
    register_backend("THEIR_STATE", "their_plugin.attention.State", is_mamba=True)


def platform():
    """What vLLM calls of a platform's plugin: the name of its class."""
    return "their_plugin.Platform"


class Platform(CpuPlatform):
    """A CPU as another platform, with an attention of its own."""

    _enum = PlatformEnum.OOT
    device_name = "their CPU"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if attn_selector_config.use_mla:
            raise NotImplementedError("no latent cache here")
        return "their_plugin.attention.Chosen"
'''
ATTENTION = '''
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend


class Custom(CPUAttentionBackend):
    get_name = staticmethod(lambda: "CUSTOM")


class Theirs(CPUAttentionBackend):
    get_name = staticmethod(lambda: "THEIR_ATTN")

    @classmethod
    def get_supported_head_sizes(cls):
        return [64]


class Chosen(Theirs):
    """What the platform chooses, and nobody has registered."""


class State(LinearAttentionBackend):
    get_name = staticmethod(lambda: "THEIR_STATE_ATTN")
'''
ENTRY_POINTS = """
[vllm.general_plugins]
theirs = their_plugin:register

[vllm.platform_plugins]
theirs = their_plugin:platform
"""


def test_every_name_of_the_registries_is_told_and_declares_what_its_class_says():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

    found = {each.name.removeprefix("vllm:"): each for each in survey("vllm", "cpu", (), Limit(300))}
    assert set(found) == {*AttentionBackendEnum.__members__, *MambaAttentionBackendEnum.__members__}
    assert {"CPU_ATTN", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"} <= {
        name for name, each in found.items() if not each.reason
    }
    assert found["CPU_ATTN"].level == "NEVER"
    assert found["CPU_ATTN"].declared["block_size"] == ("multiples of 32",)
    assert found["FLASH_ATTN"].declared["head_size"] == ("multiples of 8, 8 to 256",)
    assert found["FLASH_ATTN"].declared["compute_capability"] == ("8.0 and above",)
    assert found["TRITON_ATTN"].declared["head_size"] == ("32 and above",)
    assert found["TRITON_MLA"].declared["layers"] == ("latent",)
    assert found["FLASHMLA_SPARSE"].declared["layers"] == ("latent", "sparse")
    assert "the bridge makes no indexer" in found["FLASHMLA_SPARSE"].reason
    for name in ("TURBOQUANT", "ULTRAQUANT"):
        assert found[name].reason == "attncheck knows no dtype of its caches"
    assert found["GDN_ATTN"].declared["layers"] == ("state",)
    assert "interpret" not in found["FLASH_ATTN"].reason
    assert "supports_compute_capability" in found["ROCM_AITER_FA"].reason
    assert "its forward imports what cannot be imported here" in found["ROCM_ATTN"].reason


@pytest.fixture
def plugin(tmp_path):
    """``PYTHONPATH`` with the folder of a package of plugins, as an installer leaves it."""
    package, info = tmp_path / "their_plugin", tmp_path / "their_plugin-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(dedent(PLUGIN), encoding="utf-8")
    (package / "attention.py").write_text(dedent(ATTENTION), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugin\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return os.pathsep.join(part for part in (str(tmp_path), os.environ.get("PYTHONPATH", "")) if part)


def test_classes_of_plugins_are_examined_under_their_names(run_vllm, plugin, tmp_path):
    words = "--backend vllm:* --suite smoke --case decode.float32 --check numerics"
    sizes = ("--set", "cache.block_size=32", "--set", "cache.layout=HND")
    run, _ = run_vllm(tmp_path / "run.jsonl", *words.split(), *sizes, PYTHONPATH=plugin)
    passed = {record.backend for record in run.records if (record.check, record.outcome) == ("numerics", "passed")}
    assert {"vllm:CUSTOM", "vllm:THEIR_ATTN", "vllm:their_plugin.attention:Chosen", "vllm:CPU_ATTN"} <= passed
    surveyed = {each.name: each for each in run.header.surveyed}
    assert surveyed["vllm:THEIR_ATTN"].declared["head_size"] == ("64",)
    assert surveyed["vllm:THEIR_STATE"].declared == {"layers": ("state",)}
