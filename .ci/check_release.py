"""Build the sdist and the wheel, and check what a user would get from a package index.

Run `python .ci/check_release.py --help`. It needs the packages `build` and `twine`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def check_texts(tag: str | None) -> str:
    """Check that all places agree on the version, and that nothing is left to fill in for a release.

    Args:
        tag: the tag that is released, such as v0.1.0, or None for a rehearsal, which allows open places.

    Returns:
        The version.
    """
    version = _find(r'^__version__ = "(.+)"$', "muon_fsdp/__init__.py")
    cited = _find(r"^version: (.+)$", "CITATION.cff")
    if cited != version:
        raise SystemExit(f"CITATION.cff has version {cited}, but muon_fsdp/__init__.py has {version}: make them equal")
    heading = _find(r"^## (.+)$", "CHANGELOG.md")
    if heading.split()[0] != version:
        raise SystemExit(f"CHANGELOG.md begins with {heading!r}: add a section for {version}")
    if tag is None:
        return version
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, but the version is {version}: tag v{version}, or change the version")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        raise SystemExit(f"CHANGELOG.md begins with {heading!r}: write the date of the release, {version} (2026-01-31)")
    if "/OWNER/" in (ROOT / "pyproject.toml").read_text(encoding="utf-8"):
        raise SystemExit("pyproject.toml has the address of nobody's repository: replace OWNER in [project.urls]")
    return version


def _find(pattern: str, name: str) -> str:
    """Return what the first line of a file that matches a pattern says."""
    match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    if match is None:
        raise SystemExit(f"{name} has no line that matches {pattern}")
    return match[1]


def build(output: Path) -> None:
    """Build the sdist and the wheel, and check their metadata and the files of the wheel."""
    _run(sys.executable, "-m", "build", "--outdir", str(output), str(ROOT))
    (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
    _run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    top = {name for name in top if not name.endswith(".dist-info")}
    if top != {"muon_fsdp", "muon_optimizer.py"}:
        raise SystemExit(f"the wheel must hold muon_fsdp and muon_optimizer.py, but it holds {', '.join(sorted(top))}")


def check_install(package: Path, version: str) -> None:
    """Install a package into a new environment, import it there, and run the quick start."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "env", with_pip=True)
        python = Path(folder) / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(package))
        shutil.copy(ROOT / "examples" / "quickstart.py", folder)
        names = "muon_fsdp, muon_fsdp.elementwise, muon_optimizer"
        _run(str(python), "-c", f"import {names}; assert muon_fsdp.__version__ == {version!r}", folder=folder)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        _run(str(python), *torchrun, "quickstart.py", folder=folder)


def _run(*command: str, folder: str | None = None) -> None:
    """Run a command and end if it fails."""
    print("$", *command, flush=True)
    code = subprocess.run(command, cwd=folder, check=False).returncode
    if code:
        raise SystemExit(f"{command[0]} failed with exit status {code}")


def main() -> None:
    """Check a release or a rehearsal of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag that is released; without it, dates and addresses may be open")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the packages (default: dist)")
    parser.add_argument("step", nargs="?", choices=["all", "build", "install"], default="all", help="what to check")
    arguments = parser.parse_args()
    output: Path = arguments.output.resolve()
    version = check_texts(arguments.tag)
    if arguments.step != "install":
        if output.exists():
            raise SystemExit(f"{output} exists: remove it first, so that only new packages are published")
        build(output)
    if arguments.step != "build":
        for package in sorted(output.iterdir()):
            check_install(package, version)
    print(f"the packages of version {version} in {output} are good")


if __name__ == "__main__":
    main()
