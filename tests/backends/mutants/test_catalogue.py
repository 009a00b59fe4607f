"""Entries of the catalogue: what they may say, and how a mistake is named."""

import pytest

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


def test_the_docstring_of_a_class_says_its_fault(read):
    (found,) = read(ENTRY)
    assert (found.name, found.area, found.class_name) == ("a-fault", "area", "Fault")
    assert found.fault == "Something is wrong. Much."
    assert (found.ref, found.is_provider) == ("mutants:a-fault", False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window: 1", "is no list of mutants"),
        ("- window", "entry 1: is no mapping"),
        (ENTRY.replace("a-fault", "A fault"), "A fault.name: "),
        (ENTRY.replace("Fault", "Other"), "a-fault.fault: "),
        (ENTRY + "  old: x\n", "a-fault: Value error, give either class, or file, old and new"),
        ("- name: x\n  kind: y\n  fault: z\n  file: backends/paged.py\n", "give either class, or file, old and new"),
        (ENTRY + "  file: harness/api.py\n", "a-fault.file: "),
        (ENTRY + "  cause: (\n", "no regular expression"),
        (ENTRY + "  check: numeric\n", "no check has this name"),
        (ENTRY + "  report: 12\n", "a-fault.report: "),
        (ENTRY + "  reprot: x\n", "a-fault.reprot: Extra inputs"),
    ],
)
def test_a_mistake_is_named_with_file_entry_and_key(read, text, words):
    with pytest.raises(CaseFileError) as caught:
        read(text)
    assert words in str(caught.value)
    assert "area.yaml" in str(caught.value)


def test_names_are_unique_and_found():
    names = [mutant.name for mutant in catalogue()]
    assert len(set(names)) == len(names)
    assert mutant_of(names[-1]) == catalogue()[-1]
