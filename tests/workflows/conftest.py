"""GitHub as a workflow sees it: expressions, steps in their order, the files a step writes to, kept artifacts.

Only what the workflows of this repository use is known. Whatever else they might use fails, and is not passed over.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
STEP_KEYS = {"name", "id", "if", "env", "run", "uses", "with", "continue-on-error"}
ACTIONS = {"actions/checkout@v6", "actions/setup-python@v6", "actions/upload-artifact@v7"}
TOKENS = re.compile(r"'(?:[^']|'')*'|&&|\|\||!=|!|\b(?:true|false|null)\b|.", re.DOTALL)
TINY = {
    "EXAMINE": "--backend torch_sdpa --suite decode --case single --check numerics",
    "TIME": "--backend torch_sdpa --suite decode --case single --rounds 2 --time-limit 0.01",
    "DEVICE": "cpu",
    "PIP_CONSTRAINT": "",  # what is installed here may be newer than the pins
}
ON_MAIN = {
    "ref": "refs/heads/main",
    "ref_name": "main",
    "token": "t",
    "event": {"repository": {"default_branch": "main"}},
}
VARIABLES = {"ATTNCHECK_GPUS": '["h100"]', "ATTNCHECK_CLOCKS": '{"h100": 1410}'}
IN_PYTHON = {"&&": " and ", "||": " or ", "!": " not ", "true": "True", "false": "False", "null": "''"}


class Context(dict[str, Any]):
    """A context of expressions, such as `github`: a name it does not hold is a mistake of the workflow's."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Lenient(Context):
    """A context whose names others fill, such as `vars`: one that is not set is empty."""

    def __missing__(self, name: str) -> str:
        return ""


def evaluate(expression: str, names: Mapping[str, object]) -> Any:
    """What an expression comes to; strings, operators, properties and functions are written into Python's."""
    python = "".join(
        repr(token[1:-1].replace("''", "'")) if token.startswith("'") else IN_PYTHON.get(token, token)
        for token in TOKENS.findall(expression)
    )
    return eval(python.strip(), {"__builtins__": {}}, dict(names))


def fill(text: str, names: Mapping[str, object]) -> Any:
    """A value of the workflow's with its expressions replaced; one that is a single expression keeps its type."""
    if whole := re.fullmatch(r"\s*\$\{\{((?:(?!\}\}).)*)\}\}\s*", text, re.DOTALL):
        return evaluate(whole[1], names)
    return re.sub(r"\$\{\{(.*?)\}\}", lambda match: _text(evaluate(match[1], names)), text, flags=re.DOTALL)


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


@dataclass
class Ran:
    """A step that was executed: its exit code, and what it printed."""

    name: str
    code: int
    printed: str


@dataclass
class Job:
    """One job of a workflow; ``folder`` is its checkout, ``overrides`` replace variables of the workflow."""

    file: str
    name: str
    folder: Path
    github: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, object] = field(default_factory=dict)
    matrix: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    ran: dict[str, Ran] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    artifacts: dict[str, list[str]] = field(default_factory=dict)
    summary: str = ""
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.workflow = read_workflow(self.file)
        self.definition = self.workflow["jobs"][self.name]
        self.steps = Context()
        for step in self.definition["steps"]:
            assert step.keys() <= STEP_KEYS, f"{self.file} uses what this runner does not know: {step}"
            if "id" in step:
                self.steps[step["id"]] = Context(outcome="", outputs=Lenient())

    def names(self, env: Mapping[str, str]) -> dict[str, object]:
        """What an expression may name. Of the functions, those of the state of the job are as of now."""
        return {
            "github": _context(self.github),
            "vars": Lenient(self.variables),
            "inputs": Lenient(self.inputs),
            "matrix": Context(self.matrix),
            "steps": self.steps,
            "env": Context(env),
            "fromJSON": lambda text: json.loads(text, object_hook=Lenient),
            "success": lambda: not self.has_failed,
            "failure": lambda: self.has_failed,
            "always": lambda: True,
            "cancelled": lambda: False,
        }

    @property
    def is_wanted(self) -> bool:
        """Whether the job's own `if` holds."""
        return bool(fill(self.definition.get("if", "${{ true }}"), self.names({})))

    def combinations(self) -> list[dict[str, Any]]:
        """The matrix, of one axis."""
        ((axis, values),) = self.definition["strategy"]["matrix"].items()
        return [{axis: value} for value in fill(values, self.names({}))]

    def environment(self, step: Mapping[str, Any]) -> dict[str, str]:
        """The variables of a step, the nearest definition first."""
        env: dict[str, str] = {}
        for level in (self.workflow, self.definition, step):
            env |= {name: _text(fill(value, self.names(env))) for name, value in level.get("env", {}).items()}
        return env | {name: value for name, value in self.overrides.items() if name in env}

    def again(self, folder: Path | None = None, **changes: Any) -> "Job":
        """The same job on the same machine, nothing done yet; ``changes`` are other arguments."""
        given = ("file", "name", "github", "variables", "inputs", "matrix", "overrides", "machine")
        return Job(**{"folder": folder or self.folder, **{name: getattr(self, name) for name in given}, **changes})

    def asks_for(self, name: str) -> bool:
        """Whether the `if` of a step holds as things are."""
        (step,) = (step for step in self.definition["steps"] if name in (step.get("name"), step.get("uses")))
        condition = step.get("if", "${{ success() }}")
        if self.has_failed and not re.search(r"\b(always|cancelled|failure)\(", condition):
            return False
        return bool(fill(condition, self.names(self.environment(step))))

    def run(self, start: str | None = None) -> "Job":
        """Every step, or those from ``start`` on, as GitHub would: what fails ends those that do not ask for it."""
        steps = self.definition["steps"]
        first = next((place for place, step in enumerate(steps) if step.get("name") == start), 0)
        assert start is None or steps[first]["name"] == start
        for step in steps[first:]:
            self._take(step)
        return self

    def _take(self, step: Mapping[str, Any]) -> None:
        name = step.get("name", step.get("uses"))
        env = self.environment(step)
        names = self.names(env)
        if not self.asks_for(name):
            self.skipped.append(name)
            outcome = "skipped"
        elif "uses" in step:
            self._use(step["uses"], {key: fill(str(value), names) for key, value in step.get("with", {}).items()})
            outcome = "success"
        else:
            self.ran[name] = self._execute(name, step, env)
            outcome = "failure" if self.ran[name].code else "success"
        is_forgiven = fill(str(step.get("continue-on-error", "")), names)
        self.has_failed |= outcome == "failure" and not is_forgiven
        if "id" in step:
            self.steps[step["id"]]["outcome"] = outcome

    def _use(self, action: str, inputs: Mapping[str, str]) -> None:
        assert action in ACTIONS, f"{self.file} uses {action}, of which nothing is known here"
        if action.startswith("actions/upload-artifact"):
            given = inputs["path"].removesuffix("/")
            found = sorted(self.folder.glob(given if "*" in given else f"{given}/**/*"))
            assert found, f"{self.file} keeps {given}, which is not there"
            self.artifacts[inputs["name"]] = [path.relative_to(self.folder).as_posix() for path in found]

    def _execute(self, name: str, step: Mapping[str, Any], env: Mapping[str, str]) -> Ran:
        assert self.workflow["defaults"] == {"run": {"shell": "bash"}}, "the command below is that of `shell: bash`"
        assert "${{" not in step["run"], "what an expression comes to would be code: hand it over in `env`"
        script, summary, output = (self.folder.parent / f"{each}-of-a-step" for each in ("run", "summary", "output"))
        script.write_text(step["run"], encoding="utf-8")
        summary.write_text("", encoding="utf-8")
        output.write_text("", encoding="utf-8")
        files = {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(output)}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
            cwd=self.folder,
            env={**os.environ, **self.machine, **env, **files},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.summary += summary.read_text(encoding="utf-8")
        if "id" in step:
            pairs = (line.partition("=") for line in output.read_text(encoding="utf-8").splitlines())
            self.steps[step["id"]]["outputs"].update({key: value for key, _, value in pairs})
        return Ran(name, done.returncode, done.stdout)


def _context(values: Mapping[str, Any]) -> Context:
    return Context({key: _context(value) if isinstance(value, Mapping) else value for key, value in values.items()})


def read_workflow(file: str) -> dict[str, Any]:
    """A workflow of this repository; YAML 1.1, which PyYAML reads, takes its key `on` for a truth value."""
    read = yaml.safe_load((ROOT / ".github" / "workflows" / file).read_text(encoding="utf-8"))
    read["on"] = read.pop(True)
    return read


@pytest.fixture(scope="session")
def expressions() -> Callable[[str, Mapping[str, object]], Any]:
    return fill


@pytest.fixture(scope="session")
def lenient() -> type[Lenient]:
    return Lenient


@pytest.fixture(scope="session")
def job() -> type[Job]:
    return Job


@pytest.fixture(scope="session")
def workflow() -> Callable[[str], dict[str, Any]]:
    return read_workflow


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A copy of what git tracks, as actions/checkout leaves it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: no list of our own files")

    def copy() -> Path:
        folder = tmp_path_factory.mktemp("runner") / "checkout"
        for name in filter(None, listed.stdout.split("\0")):
            if os.path.lexists(ROOT / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        return folder

    return copy


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a runner: this interpreter first, pip that only says what it would do, without any index.

    ``STUBS``: where ``gh``, ``sudo`` and ``nvidia-smi`` of tests/workflows/stubs read what to say, and note what they
    were asked.
    """
    stubs = Path(__file__).resolve().parent / "stubs"
    folder = tmp_path_factory.mktemp("stubs")
    return {
        "PATH": os.pathsep.join([str(stubs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "STUBS": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "GITHUB_ACTIONS": "true",
        "GITHUB_REPOSITORY": "someone/something",
        "PIP_DRY_RUN": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # as pip reads it: no isolation
    }


@pytest.fixture(scope="session")
def cpu(checkout: Callable[[], Path], machine: dict[str, str]) -> Job:
    """The workflow of a CPU, from the first step to the last."""
    return Job("attncheck-cpu.yml", "examine", checkout(), ON_MAIN, overrides=TINY, machine=machine).run()


@pytest.fixture(scope="session")
def gpu(checkout: Callable[[], Path], machine: dict[str, str]) -> Job:
    """The first run on a type of GPU, when nothing is kept yet."""
    (Path(machine["STUBS"]) / "api").write_text("", encoding="utf-8")
    of = {"matrix": {"gpu": "h100"}, "overrides": TINY, "machine": machine}
    return Job("attncheck-gpu.yml", "gpu", checkout(), ON_MAIN, VARIABLES, **of).run()
