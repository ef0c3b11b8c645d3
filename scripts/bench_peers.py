"""Other people's kernels, as providers for scripts/bench_kernels: only their public functions, imported when called.

What is not installed is left out; what fails when it is imported or called is a row with its reason.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from importlib import import_module

from ligertune.bench.case import Case, Outputs, Provider, Tensors
from ligertune.bench.cases.norm_cases import EPS, GROUPS

# package -> what pip calls it
PACKAGES = {"liger_kernel": "liger-kernel", "quack": "quack-kernels", "cut_cross_entropy": "cut-cross-entropy"}
NAMES = {"liger_kernel": "liger", "quack": "quack", "cut_cross_entropy": "cce"}


def installed() -> dict[str, str]:
    """Versions of the peers that are here, by package; "?" for one that merely lies on the path."""
    here = [package for package in PACKAGES if importlib.util.find_spec(package)]
    known = {dist.metadata["Name"].replace("_", "-"): dist.version for dist in importlib.metadata.distributions()}
    return {package: known.get(PACKAGES[package], "?") for package in here}


def providers() -> dict[str, tuple[Provider, ...]]:
    """By op, of the peers that are installed."""
    here = installed()
    return {op: tuple(_provider(*row) for row in rows if row[0] in here) for op, rows in PEERS.items()}


Peer = tuple[str, str, str, Callable[..., Outputs], bool]  # package, module, function, its call, whether in place


def _provider(package: str, module: str, function: str, call: Callable[..., Outputs], overwrites: bool) -> Provider:
    def make(case: Case, args: Tensors) -> Callable[[], Outputs]:
        theirs = getattr(import_module(module), function)
        return lambda: call(theirs, *args)

    return Provider(NAMES[package] + (", in place" if overwrites else ""), make, overwrites)


def liger(function: str, call: Callable[..., Outputs], overwrites: bool = False) -> Peer:
    return "liger_kernel", "liger_kernel.transformers.functional", function, call, overwrites


def quack(module: str, function: str, call: Callable[..., Outputs], overwrites: bool = False) -> Peer:
    return "quack", module, function, call, overwrites


def _exact_cce(theirs: Callable[..., Outputs], hidden, weight, labels) -> Outputs:
    """Without its filter, which drops small gradients: as an option in older versions, as a name in newer ones."""
    older = "filter_eps" in inspect.signature(theirs).parameters
    return theirs(hidden, weight, labels, **({"filter_eps": None} if older else {"impl": "cce_exact"}))


def _quack_rope(theirs: Callable[..., Outputs], q, k, cos, sin) -> Outputs:
    """It takes (B, T, H, D), one tensor a call, and the cosines of one half."""
    half = cos.shape[-1] // 2
    tables = cos[0, :, :half], sin[0, :, :half]
    return tuple(theirs(x.transpose(1, 2), *tables).transpose(1, 2) for x in (q, k))


PEERS: dict[str, tuple[Peer, ...]] = {
    "linear_cross_entropy": (
        liger("liger_fused_linear_cross_entropy", lambda f, hidden, weight, labels: f(hidden, weight, labels)),
        quack("quack.linear_cross_entropy", "chunked_linear_cross_entropy", lambda f, *args: f(*args)),
        ("cut_cross_entropy", "cut_cross_entropy", "linear_cross_entropy", _exact_cce, False),
    ),
    "cross_entropy": (
        liger("liger_cross_entropy", lambda f, logits, labels: f(logits.view_as(logits), labels), overwrites=True),
        quack("quack", "cross_entropy", lambda f, logits, labels: f(logits, labels)),
        quack(
            "quack",
            "cross_entropy",
            lambda f, logits, labels: f(logits.view_as(logits), labels, inplace_backward=True),
            overwrites=True,
        ),
    ),
    "rms_norm": (
        liger("liger_rms_norm", lambda f, x, weight: f(x, weight, EPS)),
        quack("quack", "rmsnorm", lambda f, x, weight: f(x, weight, eps=EPS)),
    ),
    "add_rms_norm": (
        liger("liger_fused_add_rms_norm", lambda f, x, residual, weight: f(x, residual, weight, EPS)),
        quack(
            "quack", "rmsnorm", lambda f, x, residual, weight: f(x, weight, residual=residual, eps=EPS, prenorm=True)
        ),
    ),
    "layer_norm": (liger("liger_layer_norm", lambda f, x, weight, bias: f(x, weight, bias, EPS)),),
    "group_norm": (liger("liger_group_norm", lambda f, x, weight, bias: f(x, weight, bias, x.shape[1], GROUPS, EPS)),),
    "apply_rope": (
        liger("liger_rope", lambda f, q, k, cos, sin: f(q, k, cos, sin), overwrites=True),
        quack("quack.rotary", "apply_rotary_emb", _quack_rope),
    ),
    "swiglu": (liger("liger_swiglu", lambda f, gate, up: f(gate, up), overwrites=True),),
    "geglu": (liger("liger_geglu", lambda f, gate, up: f(gate, up), overwrites=True),),
    "kl_div": (liger("liger_kl_div", lambda f, p, q: f(p, q, reduction="batchmean")),),
    "jsd": (liger("liger_jsd", lambda f, student, teacher: f(student, teacher)),),
    "linear_jsd": (liger("liger_fused_linear_jsd", lambda f, *args: f(*args)),),
}
