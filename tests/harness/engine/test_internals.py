"""A vLLM that lacks what the observer uses is named before an engine starts."""

import pytest

from attncheck.errors import QuestionError
from attncheck.harness.engine import internals
from attncheck.harness.engine.internals import check_internals, missing_internals

RUNNER = {"vllm.v1.runner": ("the steps", "Runner execute_model input_batch")}


def package(folder, text):
    module = folder / "vllm" / "v1" / "runner.py"
    module.parent.mkdir(parents=True)
    module.write_text(text)
    return folder


def test_methods_and_attributes_are_found_without_an_import(tmp_path):
    text = "import nothing_of_that_name\nclass Runner:\n    def execute_model(self):\n        self.input_batch = 1\n"
    assert missing_internals(package(tmp_path, text), RUNNER) == ()


def test_what_is_gone_is_named_with_its_use(tmp_path):
    text = "class Runner:\n    def execute(self):\n        return self.input_batch\n"
    assert missing_internals(package(tmp_path, text), RUNNER) == (
        "vLLM has no vllm.v1.runner.execute_model: attncheck engine needs it for the steps",
        "vLLM has no vllm.v1.runner.input_batch: attncheck engine needs it for the steps",
    )


def test_the_first_parameters_of_a_method_are_compared(tmp_path):
    folder = package(tmp_path, "class Runner:\n    def execute_model(self, plan, tensors=None, more=0): ...\n")
    for name, is_there in (("(plan,tensors)", True), ("(tensors)", False)):
        internals = {"vllm.v1.runner": ("the steps", f"execute_model{name}")}
        assert bool(missing_internals(folder, internals)) is not is_there


@pytest.mark.parametrize(
    ("text", "gone"),
    [("class Other:\n    execute_model = input_batch = 0", "vllm.v1.runner.Runner"), (None, "module vllm.v1.runner")],
)
def test_a_class_or_module_that_is_gone_is_named_once(tmp_path, text, gone):
    folder = tmp_path if text is None else package(tmp_path, text)
    (sentence,) = missing_internals(folder, RUNNER)
    assert sentence == f"vLLM has no {gone}: attncheck engine needs it for the steps"


def test_an_environment_without_vllm(monkeypatch):
    monkeypatch.setattr(internals, "find_spec", lambda _: None)
    with pytest.raises(QuestionError, match="vLLM is not installed"):
        check_internals()
