"""Kernels that are compiled before they are launched, for an H100 that is absent."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ligertune_kernels import rms_norm, swiglu
from ligertune_kernels.launcher import TRITON_INSTALLED, meta_runs_as
from ligertune_kernels.precompile import KernelForm, Precompilation, launched_forms, load_launchers_apart

if not TRITON_INSTALLED:
    pytest.skip("there is no kernel to compile", allow_module_level=True)
from support.kernels.pretend_gpu import TARGETS, PretendDriver
from triton import knobs
from triton.runtime import build, driver

META = torch.device("meta")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of the kernels that Triton compiles or reads from its cache, which is empty."""
    names = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", PretendDriver(TARGETS["sm90"]))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, metadata, **others: names.append(metadata["name"]))
    with meta_runs_as(TARGETS["sm90"]):
        yield names


def step():
    x = torch.empty(64, 256, dtype=torch.bfloat16, device=META, requires_grad=True)
    weight = torch.empty(256, dtype=torch.bfloat16, device=META, requires_grad=True)
    y = rms_norm(x, weight)
    swiglu(y, y).sum().backward()


def test_a_step_launches_nothing_while_its_kernels_are_listed_and_compiles_nothing_afterwards(compiled):
    before = driver.active
    forms = launched_forms(step, META)
    assert driver.active is before and knobs.runtime.jit_cache_hook is None
    assert compiled == [] and len(forms) == len({(form.name, form.specialization) for form in forms}) >= 4
    assert Precompilation(forms, META, threads=2).wait() == []
    assert sorted(compiled) == sorted(form.name for form in forms)
    step()
    assert len(compiled) == len(forms)


def test_the_driver_is_restored_after_an_error(compiled):
    before = driver.active
    with pytest.raises(ZeroDivisionError):
        launched_forms(lambda: 1 / 0, META)
    assert driver.active is before and knobs.runtime.jit_cache_hook is None


def test_an_error_of_the_compiler_is_named_and_the_other_kernels_are_compiled(compiled):
    class Refused:
        __name__ = "refused_kernel"

        def preload(self, specialization):
            raise ValueError("no such instruction")

    forms = [KernelForm(Refused(), ""), *launched_forms(step, META)]
    assert Precompilation(forms, META, threads=1).wait() == ["refused_kernel: ValueError: no such instruction"]
    assert len(compiled) == len(forms) - 1


def test_a_device_without_kernels_has_none_to_compile():
    assert launched_forms(lambda: 1 / 0, torch.device("cpu")) == []
    assert Precompilation([], torch.device("cpu"), threads=1).wait() == []


LAUNCHER_IN_C = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef Methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef Definition = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", NULL, -1, Methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) {
  PyObject* module = PyModule_Create(&Definition);
  PyModule_AddFunctions(module, Methods);
  return module;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="no compiler of C")
def test_launchers_in_c_that_are_loaded_again_do_not_replace_each_other(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    load_launchers_apart()

    def load(number):
        return build.compile_module_from_src(LAUNCHER_IN_C % number, "launcher_of_a_test")

    modules = [load(number) for number in range(3)]
    load(0)
    assert [module.launch() for module in modules] == [0, 1, 2]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda turn: load(turn % 3).launch(), range(300))
    assert list(found) == [0, 1, 2] * 100
