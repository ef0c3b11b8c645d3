"""The built package. Without Hugging Face's package `kernels` the tests of this folder are skipped."""

import functools
import os
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from support.script_modules import load_script
from transformers.utils import import_utils

ANY_VERSION = "LIGERTUNE_TEST_ANY_VERSION_OF_KERNELS"
if ANY_VERSION in os.environ:
    # Each version of transformers takes one minor version of `kernels`, which may not be the installed one; the
    # interface has been the same since 0.17. Models read this when their files are imported, which is later.
    accepts = functools.partial(import_utils.is_kernels_available, "0.17.0", "1.0")
    transformers.utils.is_kernels_available = import_utils.is_kernels_available = accepts


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "package"
    load_script("build_hub_package").build(out)
    return out


@pytest.fixture
def kernel(package) -> ModuleType:
    from kernels import get_local_kernel

    return get_local_kernel(package)
