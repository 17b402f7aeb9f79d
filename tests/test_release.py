"""What a release needs: links of the package's page, equal versions, workflows that name what exists."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import muon_fsdp

ROOT = Path(__file__).parent.parent


def load(path: str) -> ModuleType:
    """Import a file that is not part of a package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="hook")
def hook_fixture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build hook; hatchling is there only while a package is built."""
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)  # type: ignore[arg-type]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return load("hatch_build.py")


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("![a picture](docs/a.png)", "![a picture](https://x/y/raw/v1.0/docs/a.png)"),
        ("[page](docs/a.md#part)", "[page](https://x/y/blob/v1.0/docs/a.md#part)"),
        ("[`code`](a.py) and [b](b.py)", "[`code`](https://x/y/blob/v1.0/a.py) and [b](https://x/y/blob/v1.0/b.py)"),
        ("[part](#part) [out](https://z)", "[part](#part) [out](https://z)"),
        ("[![t](../../a/b.svg)](../../a/b)", "[![t](https://x/y/a/b.svg)](https://x/y/a/b)"),
        ("[![t](https://z)](LICENSE)", "[![t](https://z)](https://x/y/blob/v1.0/LICENSE)"),
        ('<img alt="a" src="a/b.svg">', '<img alt="a" src="https://x/y/raw/v1.0/a/b.svg">'),
        ('<img src="https://z/b.svg">', '<img src="https://z/b.svg">'),
        (
            '<picture>\n<source media="(m: dark)" srcset="d.svg">\n<img src="l.svg" alt="a"></picture>',
            '<picture>\n<source media="(m: dark)" srcset="https://x/y/raw/v1.0/d.svg">\n'
            '<img src="https://x/y/raw/v1.0/l.svg" alt="a"></picture>',
        ),
    ],
)
def test_links_become_absolute(hook: ModuleType, link: str, expected: str) -> None:
    assert hook.absolute_links(f"see {link}.", "https://x/y", "1.0") == f"see {expected}."


def test_no_relative_link_is_left_in_the_description(hook: ModuleType) -> None:
    metadata = {"urls": {"Repository": "https://x/y"}, "version": "1.0"}
    hook.CustomMetadataHook.update(SimpleNamespace(root=str(ROOT)), metadata)
    text = metadata["readme"]["text"]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)", prose)
    assert len(targets) > 20
    pictures = re.findall(r'\b(?:src|srcset)="([^"]*)"', prose)
    assert len(pictures) == 4
    targets += pictures
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    code = [re.findall(r"```.*?```", page, flags=re.DOTALL) for page in (text, (ROOT / "README.md").read_text())]
    assert code[0] == code[1]


def test_the_texts_agree_and_a_release_refuses_open_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check = load(".ci/check_release.py")
    version = muon_fsdp.__version__
    assert check.check_texts(None) == version
    for name in ("muon_fsdp/__init__.py", "CITATION.cff", "CHANGELOG.md", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(check, "ROOT", tmp_path)
    changelog = re.sub(
        r"^## .*$", f"## {version} (2026-01-31)", (ROOT / "CHANGELOG.md").read_text(), count=1, flags=re.M
    )
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    project = (ROOT / "pyproject.toml").read_text().replace("/OWNER/", "/somebody/")
    (tmp_path / "pyproject.toml").write_text(project)
    assert check.check_texts(f"v{version}") == version
    with pytest.raises(SystemExit, match=r"the tag is v9, but the version is"):
        check.check_texts("v9")
    (tmp_path / "pyproject.toml").write_text(project.replace("/somebody/", "/OWNER/"))
    with pytest.raises(SystemExit, match=r"replace OWNER in \[project.urls\]"):
        check.check_texts(f"v{version}")
    (tmp_path / "CHANGELOG.md").write_text(changelog.replace("(2026-01-31)", "(unreleased)"))
    with pytest.raises(SystemExit, match="write the date of the release"):
        check.check_texts(f"v{version}")
    (tmp_path / "CITATION.cff").write_text("version: 9.9\n")
    with pytest.raises(SystemExit, match=r"CITATION.cff has version 9.9"):
        check.check_texts(None)


def test_every_address_of_the_repository_is_that_of_pyproject() -> None:
    """[project.urls] is the source: whoever changes the owner there is told about every page that still has the old."""
    address = r"github\.com/([\w.-]+/muon_fsdp)\b"
    (source,) = set(re.findall(address, (ROOT / "pyproject.toml").read_text()))
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.cff"),
        *(ROOT / ".github").rglob("*.yml"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "muon_fsdp").rglob("*.py"),
        ROOT / "mkdocs.yml",
    ]
    found = {path: set(re.findall(address, path.read_text())) for path in pages}
    assert {str(path): names for path, names in found.items() if names - {source}} == {}
    for page in ("index.md", "zh.md"):
        assert f"pip install git+https://github.com/{source}\n" in (ROOT / "docs" / page).read_text()


def test_workflows_name_what_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        assert set(re.findall(r"\bmake (\w+)", text)) <= targets, path.name
        for name in re.findall(r"python (\.ci/\S+)|uses: \./(\S+)", text):
            assert (ROOT / "".join(name)).exists(), path.name
    core = makefile.partition("CORE := ")[2].partition("\nTORCH")[0]
    names = core.partition("addsuffix .py,")[2].rstrip(")\n").replace("\\\n", " ").split()
    assert len(names) > 20
    assert [name for name in names if not (ROOT / "tests" / f"test_{name}.py").exists()] == []
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        if form.name != "config.yml":
            assert "muon-fsdp doctor" in form.read_text()
