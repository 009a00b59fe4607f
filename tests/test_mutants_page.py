"""docs/mutants.md is true: its command prints what it shows, and its entries are some of the catalogue."""

import re
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from attncheck.backends.mutants.catalogue import Mutant, catalogue

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "mutants.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_prints_what_is_shown(shell, tmp_path):
    ((command, shown),) = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    code, printed = shell(command, tmp_path)
    assert code == 0, printed
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_entries_that_are_shown_are_some_of_the_catalogue():
    shown = [yaml.safe_load(dedent(text)) for text in re.findall(r"(?:^    \S?.*\n)+", TEXT, re.MULTILINE)]
    assert len(shown) == 2
    known = {mutant.name: mutant for mutant in catalogue()}
    for (entry,) in shown:
        found = known[entry["name"]]
        assert Mutant.model_validate({"fault": found.fault, "area": found.area} | entry) == found


def test_every_key_of_an_entry_is_explained():
    keys = {field.alias or name for name, field in Mutant.model_fields.items()} - {"area"}
    explained = "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", explained)) == keys
