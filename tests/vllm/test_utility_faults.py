"""Faults put into copies of vLLM's utilities are found, each by the function it is in, all in one process."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from attncheck.harness.providers.batches import ALWAYS, drawn_batches
from attncheck.harness.providers.examine import SUBJECTS, examine_subject
from attncheck.harness.providers.provider import SubjectSetting, load_provider

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

FAULTS = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text(encoding="utf-8"))
BY_KEY = {subject.key: subject for subject in SUBJECTS}
KINDS = {"value", "edge", "manner"}


@pytest.fixture(scope="module")
def vllm():
    return load_provider("vllm")


@pytest.fixture(scope="module")
def setting():
    return SubjectSetting((*ALWAYS, *drawn_batches(1, 30)), torch.device("cpu"))


def home_of(provider, name):
    """The module whose text holds the function: another one may offer it, too."""
    place = next(module.__name__ for module in provider.modules if hasattr(module, name))
    return sys.modules[getattr(provider.find(name), "__module__", place)]


def copy_of(module, old, new):
    """The module executed again from its text, of which ``old``, there once, is ``new``."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{module.__name__} holds this {text.count(old)} times: {old}"
    made = ModuleType(module.__name__)
    made.__file__ = module.__file__
    exec(compile(text.replace(old, new), module.__file__, "exec"), vars(made))
    return made


def examined(provider, setting, function, old, new):
    faulty = copy_of(home_of(provider, function), old, new)
    return examine_subject(replace(provider, modules=[faulty, *provider.modules]), BY_KEY[function], setting)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault['function']}: {fault['new'].strip()[:60]}")
def test_a_fault_is_found(vllm, setting, fault):
    seen = examined(vllm, setting, fault["function"], fault["old"], fault["new"])
    assert seen.first is not None or seen.stale


def test_a_copy_without_a_fault_is_as_right_as_the_original(vllm, setting):
    for function in dict.fromkeys(fault["function"] for fault in FAULTS):
        seen = examined(vllm, setting, function, "# SPDX-License-Identifier: Apache-2.0\n", "")
        assert (function, seen.first, seen.stale) == (function, None, ())


def test_every_function_that_vllm_has_is_given_every_kind_of_fault(vllm):
    given = Counter((fault["function"], fault["kind"]) for fault in FAULTS)
    there = {subject.key for subject in SUBJECTS if vllm.find(subject.name, subject.generation)}
    lacking = {(name, kind) for name in there - {"PAD_SLOT_ID"} for kind in KINDS if not given[name, kind]}
    assert lacking == set()
