"""The document of a run: every section has a name, and blocks are text in each format."""

from typing import get_args

from attncheck.reports.document.blocks import BREAK, Code, Folded, Item, Items, SectionName, Span, Table
from attncheck.reports.document.run import SECTIONS
from attncheck.reports.markdown import text as markdown
from attncheck.reports.markdown.run import ORDER as OF_MARKDOWN
from attncheck.reports.terminal import text as terminal
from attncheck.reports.terminal.columns import Style
from attncheck.reports.terminal.run import ORDER as OF_TERMINAL

ITEMS = Items((Item((Span("a_b: ", is_bold=True), Span("failed", is_bold=True, colour="red", is_loud=True), ": *")),))
BOTH = Folded("<More>", (ITEMS, Code("x\n  y")))


def test_every_section_has_a_name_and_a_place():
    names = get_args(SectionName)
    assert tuple(SECTIONS) == names
    assert set(OF_TERMINAL) == set(names)
    assert set(OF_MARKDOWN) == set(names) - {"verdict", "conventions"}  # these come first, and beside the backends


def test_a_format_decides_on_bold_case_colour_and_folds():
    assert markdown.render([BOTH]) == "### &lt;More>\n\n- **a_b: failed**: \\*\n\n```text\nx\n  y\n```"
    folded = markdown.render([BOTH], folds=True)
    assert folded.startswith("<details><summary>&lt;More&gt;</summary>\n\n- **a_b: failed**: \\*\n\n")
    assert terminal.render([ITEMS, *BOTH.blocks[1:], BOTH], Style()) == "a_b: FAILED: *\n\n  x\n    y"
    assert terminal.render([ITEMS], Style(color=True)) == "a_b: \033[31mFAILED\033[0m: *"


def test_a_line_to_copy_is_not_wrapped():
    command = "attncheck run " + "word " * 10 + "end"
    items = Items((Item(command, is_whole=True),), "repeat")
    assert terminal.render([items], Style(40)) == f"repeat\n  {command}"
    assert markdown.render([items]) == f"**repeat**\n\n- `{command}`"


def test_a_table_keeps_its_cells_whatever_they_hold():
    table = Table(("name\nof it", "value"), (((Span("a|b", is_code=True), BREAK, "c|d"), "1\n2"),))
    assert markdown.render([table]) == "| name of it | value |\n| --- | --- |\n| `a\\|b`<br>c\\|d | 1 2 |"
    assert terminal.render([table], Style()) == "name   value\nof it\na|b    1 2"
