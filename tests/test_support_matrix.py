"""docs/support.md is what the rules, the planner and the patching code say."""

from support.script_modules import script_module


def test_the_page_is_what_the_script_writes():
    script = script_module("generated_pages.support_page")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run scripts/support_matrix"
