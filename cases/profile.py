"""Profiles: what a backend of one kind must pass to conform, as rules that select cases and checks of built-in suites.

A file of ``cases/profiles`` is a profile. The first rule that selects a check of a case decides::

    name: vllm-0.32-decoder     # as the file is called
    version: 1                  # raise it when the selection changes
    description: a decoder layer over a paged KV cache
    graph_level: ALWAYS         # optional: the least CUDA-graph level that must be declared and measured
    rules:
      - suite: smoke
        must: pass              # or pass_if_declared: may be declared unsupported instead
        features: []            # the features that the cases may need; left out: any
        forms: {path: [paged]}  # the sizes and forms that the cases may have; left out: any
        checks: [numerics]      # left out: all that the case has
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from attncheck.cases.validation import validate
from attncheck.cases.yaml_tree import parse_yaml, read_text
from attncheck.errors import UnknownNameError

_PROFILES = Path(__file__).parent / "profiles"

Must = Literal["pass", "pass_if_declared"]
"""``pass``: the check must pass. ``pass_if_declared``: the backend may declare instead that it does not support it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Selects checks of the cases of a suite, by what the cases need."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    suite: str
    must: Must
    features: tuple[str, ...] | None = None
    forms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checks: tuple[str, ...] | None = None

    def selects(self, needs: Collection[str]) -> bool:
        """Return whether a case with these needs is selected; ``needs`` are features, and forms as ``key=value``."""
        features = [need for need in needs if "=" not in need]
        forms = dict(need.split("=", 1) for need in needs if "=" in need)
        if self.features is not None and not set(features) <= set(self.features):
            return False
        return all(name not in forms or forms[name] in values for name, values in self.forms.items())


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A versioned list of rules. ``graph_level``: the least CUDA-graph level, or None for any."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    name: str
    version: int
    description: str
    rules: tuple[Rule, ...]
    graph_level: Literal["UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"] | None = None


def profile_names() -> list[str]:
    """Return the names of the profiles, in alphabetical order."""
    return sorted(path.stem for path in _PROFILES.glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """Return the profile called ``name``.

    Raises:
        UnknownNameError: there is no such profile.
        CaseFileError: the file is wrong, at the line that is wrong.
    """
    if name not in profile_names():
        raise UnknownNameError("profile", name, profile_names())
    path = _PROFILES / f"{name}.yaml"
    return validate(Profile, parse_yaml(read_text(path), str(path)), "a profile")
