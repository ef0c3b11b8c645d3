"""Providers of peer libraries for scripts/bench kernels: their public functions, imported when called.

Libraries that are not installed are left out. A failure to import or to call becomes a row with its reason.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from importlib import import_module

from ligertune.bench.case import Case, Outputs, Provider, Tensors
from ligertune.bench.cases.norm_cases import EPS, GROUPS

# import name -> distribution
PACKAGES = {"liger_kernel": "liger-kernel", "quack": "quack-kernels", "cut_cross_entropy": "cut-cross-entropy"}
NAMES = {"liger_kernel": "liger", "quack": "quack", "cut_cross_entropy": "cce"}


def installed() -> dict[str, str]:
    """Return versions of the installed peers by package; "?" for one that is on the path without metadata."""
    here = [package for package in PACKAGES if importlib.util.find_spec(package)]
    known = {dist.metadata["Name"].replace("_", "-"): dist.version for dist in importlib.metadata.distributions()}
    return {package: known.get(PACKAGES[package], "?") for package in here}


def providers() -> dict[str, tuple[Provider, ...]]:
    """Return providers of the installed peers by op."""
    here = installed()
    return {op: tuple(_provider(*row) for row in rows if row[0] in here) for op, rows in PEERS.items()}


Peer = tuple[str, str, str, Callable[..., Outputs], bool]  # package, module, function, its call, whether in place


def _provider(package: str, module: str, function: str, call: Callable[..., Outputs], overwrites: bool) -> Provider:
    def make(case: Case, args: Tensors) -> Callable[[], Outputs]:
        peer = getattr(import_module(module), function)
        return lambda: call(peer, *args)

    return Provider(NAMES[package] + (", in place" if overwrites else ""), make, overwrites)


def liger(function: str, call: Callable[..., Outputs], overwrites: bool = False) -> Peer:
    return "liger_kernel", "liger_kernel.transformers.functional", function, call, overwrites


def quack(module: str, function: str, call: Callable[..., Outputs], overwrites: bool = False) -> Peer:
    return "quack", module, function, call, overwrites


def _exact_cce(peer: Callable[..., Outputs], hidden, weight, labels) -> Outputs:
    """Call without the filter that drops small gradients; older versions have an option for it, newer ones a name."""
    older = "filter_eps" in inspect.signature(peer).parameters
    return peer(hidden, weight, labels, **({"filter_eps": None} if older else {"impl": "cce_exact"}))


def _quack_rope(peer: Callable[..., Outputs], q, k, cos, sin) -> Outputs:
    """Call with (B, T, H, D), one tensor per call, and the cosines of half the columns."""
    half = cos.shape[-1] // 2
    tables = cos[0, :, :half], sin[0, :, :half]
    return tuple(peer(x.transpose(1, 2), *tables).transpose(1, 2) for x in (q, k))


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
