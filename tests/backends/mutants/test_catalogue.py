"""Entries of the catalogue: what they may hold, and how a mistake is named."""

import pytest
from inline_snapshot import snapshot

from attncheck.backends.mutants.catalogue import catalogue, mutant_of, read_mutants
from attncheck.errors import CaseFileError

ENTRY = "- name: a-fault\n  class: Fault\n  kind: window\n"
CODE = 'class Fault:\n    """Something is\n    wrong.\n\n    Much.\n    """\n'


@pytest.fixture
def read(tmp_path):
    def read(text, code=CODE):
        path = tmp_path / "area.yaml"
        path.write_text(text)
        path.with_suffix(".py").write_text(code)
        return list(read_mutants(path))

    return read


def test_the_docstring_of_a_class_states_its_fault(read):
    (found,) = read(ENTRY)
    assert (found.name, found.area, found.class_name) == ("a-fault", "area", "Fault")
    assert found.fault == "Something is wrong. Much."
    assert (found.ref, found.is_provider) == ("mutants:a-fault", False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window: 1", snapshot("TMP/area.yaml: the file must hold a list of mutants (found 'dict')")),
        ("- window", snapshot("TMP/area.yaml: entry 1: is no mapping (found 'window')")),
        (
            ENTRY.replace("a-fault", "A fault"),
            snapshot(
                "TMP/area.yaml: A fault.name: String should match pattern '^[a-z0-9]+(-[a-z0-9]+)*$' (found 'A fault')"
            ),
        ),
        (
            ENTRY.replace("Fault", "Other"),
            snapshot("TMP/area.yaml: a-fault.fault: String should have at least 1 character (found '')"),
        ),
        (
            ENTRY + "  old: x\n",
            snapshot(
                "TMP/area.yaml: a-fault: Value error, a mutant has either class alone, or old and new, with equally many texts"
            ),
        ),
        (
            "- name: x\n  kind: y\n  fault: z\n  old: [a, b]\n  new: c\n",
            snapshot(
                "TMP/area.yaml: x: Value error, a mutant has either class alone, or old and new, with equally many texts"
            ),
        ),
        (
            ENTRY + "  file: harness/api.py\n",
            snapshot(
                "TMP/area.yaml: a-fault.file: String should match pattern '^(backends|reference)/[\\w/]+\\.py$' (found 'harness/api.py')"
            ),
        ),
        (
            ENTRY + "  cause: (\n",
            snapshot(
                "TMP/area.yaml: a-fault.cause: Value error, no regular expression: missing ), unterminated subpattern at position 0 (found '(')"
            ),
        ),
        (
            ENTRY + "  check: numeric\n",
            snapshot(
                "TMP/area.yaml: a-fault.check: Value error, no check has this name; known are numerics, lse, cache_write, containment, features, determinism, invariance, builder, streams, cudagraph, refusals, timing, utilities (found 'numeric')"
            ),
        ),
        (
            ENTRY + "  report: 12\n",
            snapshot("TMP/area.yaml: a-fault.report: Input should be a valid string (found 12)"),
        ),
        (
            ENTRY + "  reprot: x\n",
            snapshot("TMP/area.yaml: a-fault.reprot: Extra inputs are not permitted (found 'x')"),
        ),
    ],
)
def test_a_mistake_is_named_with_file_entry_and_key(plain, read, text, words):
    with pytest.raises(CaseFileError) as caught:
        read(text)
    assert plain(str(caught.value)) == words


def test_names_are_unique_and_found():
    names = [mutant.name for mutant in catalogue()]
    assert len(set(names)) == len(names)
    assert mutant_of(names[-1]) == catalogue()[-1]
