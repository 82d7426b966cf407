"""A release has the version of the package and its section of the changelog."""

import pytest

from tools import release_notes

VERSION = release_notes.version_of((release_notes.ROOT / "atomrl" / "__init__.py").read_text(encoding="utf-8"))
CHANGELOG = (release_notes.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_version_has_its_section_of_the_changelog():
    assert "\n- " in release_notes.notes(f"v{VERSION}", CHANGELOG, VERSION)


def test_only_its_own_section_is_printed():
    text = "# Changelog\n\n## 0.2.0\n\n- New.\n\n## 0.1.0\n\n- First.\n"
    assert release_notes.notes("v0.2.0", text, "0.2.0") == "- New."


@pytest.mark.parametrize(("tag", "version", "message"), [("v0.2", "0.2.0", "tag v"), ("v3.0.0", "3.0.0", "no section")])
def test_a_wrong_tag_and_a_missing_section_stop_the_release(tag, version, message):
    with pytest.raises(SystemExit, match=message):
        release_notes.notes(tag, "## 0.2.0\n\n- New.\n", version)
