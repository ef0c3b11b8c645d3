"""Graphs of torch.compile that launch kernels, traced on meta tensors for an H100 that is absent."""

import pytest
import torch
from functorch.compile import make_boxed_func
from ligertune_kernels import (
    ExpertLora,
    ExpertProjection,
    causal_conv1d,
    experts,
    gated_delta_rule,
    gated_rms_norm,
    kda,
    layer_norm,
    linear_cross_entropy,
    multi_head_linear_cross_entropy,
    rms_norm,
    swiglu,
)
from ligertune_kernels.launcher import TRITON_INSTALLED
from ligertune_kernels.ops.attention.document_attention import Documents
from ligertune_kernels.ops.moe import tiles
from ligertune_kernels.ops.recurrence.ssd.mamba_functions import mamba_split_conv1d_scan_combined
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops import triton_kernel_wrap

if not TRITON_INSTALLED:
    pytest.skip("there is no kernel to trace", allow_module_level=True)
from support.kernels.pretend_gpu import TARGETS
from support.kernels.traced_kernels import traced_for

HIDDEN, VOCAB = 64, 96
CHANGES = torch.ops.higher_order.triton_kernel_wrapper_functional


@pytest.fixture
def h100(monkeypatch):
    with traced_for(TARGETS["sm90"], monkeypatch):
        yield


def recording_backend():
    """Return a backend of torch.compile and the lists it fills: (graphs, what each launch changes, backend)."""
    graphs, changed = [], []

    def collect(graph, _):
        for node in graph.graph.find_nodes(op="call_function", target=CHANGES):
            changed.append([node.kwargs["kwargs"][name].op for name in node.kwargs["tensors_to_clone"]])
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_autograd(fw_compiler=collect)(graph, inputs)

    return graphs, changed, backend


def one_head(hidden, weight, labels):
    return linear_cross_entropy(hidden, weight, labels)


def three_heads(hidden, weight, labels):
    return multi_head_linear_cross_entropy([hidden] * 3, weight, labels.expand(3, -1), (1.0, 0.5, 0.25)).loss


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", [one_head, three_heads])
def test_two_graphs_serve_all_numbers_of_rows_and_no_kernel_changes_their_inputs(loss_of, h100):
    """inductor copies an input that a kernel changes, and that of torch 2.11 fails where its size varies."""
    graphs, launches = [], []

    def collect(graph, _):
        for node in graph.graph.find_nodes(op="call_function", target=CHANGES):
            changed = [node.kwargs["kwargs"][name].op for name in node.kwargs["tensors_to_clone"]]
            launches.append((triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"]), changed))
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_autograd(fw_compiler=collect)(graph, inputs)

    def step(x, norm_weight, norm_bias, weight, labels):
        normed = layer_norm(gated_rms_norm(rms_norm(x, norm_weight), x, norm_weight), norm_weight, norm_bias)
        return loss_of(swiglu(normed, x), weight, labels)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n_rows in (48, 24, 34, 66, 5000):
        sizes = (n_rows, HIDDEN), (HIDDEN,), (HIDDEN,), (VOCAB, HIDDEN)
        leaves = [torch.empty(size, device="meta", requires_grad=True) for size in sizes]
        compiled(*leaves, torch.empty(n_rows, dtype=torch.int64, device="meta")).backward()
    assert len(graphs) == 2
    assert len(launches) > 10
    assert not [kernel for kernel, changed in launches if "placeholder" in changed]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recurrences_are_one_graph_that_changes_no_input(packed, h100):
    """Rows of more than one chunk and run: a dimension of 1 is another graph."""
    graphs, changed, backend = recording_backend()

    def step(x, weight, decay, beta, places):
        documents = Documents(*places) if packed else None
        mixed = causal_conv1d(x.transpose(1, 2), weight, activation="silu", documents=documents)
        query, key, value = mixed.transpose(1, 2).unflatten(-1, (3, 2, 32)).unbind(2)
        return gated_delta_rule(query, key, value, decay, beta, l2_norm=True, documents=documents)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n_tokens in (300, 5000):
        shapes = (1, n_tokens, 192), (192, 4), (1, n_tokens, 2), (1, n_tokens, 2)
        leaves = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        places = torch.empty(2, n_tokens, dtype=torch.int32, device="meta")
        for t in (leaves[0], *leaves[2:], places):
            torch._dynamo.mark_dynamic(t, 1)
        compiled(*leaves, places).sum().backward()
        assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    assert len(graphs) == 1
    assert len(changed) > 10
    assert not [ops for ops in changed if "placeholder" in ops]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_mixer_of_mamba_is_one_graph_that_changes_no_input(packed, h100):
    """Rows of more than one chunk: a dimension of 1 is another graph."""
    graphs, changed, backend = recording_backend()
    heads, groups, head_dim, state_dim = 32, 1, 16, 32  # two parts of a group
    inner, keys = heads * head_dim, groups * state_dim

    def step(zxbcdt, weight, dt_bias, A, D, norm, places):
        options = {"document_places": places} if packed else {"return_final_states": True}
        found = mamba_split_conv1d_scan_combined(
            zxbcdt, weight, None, dt_bias, A, D, 256, rmsnorm_weight=norm, headdim=head_dim,
            ngroups=groups, **options,
        )  # fmt: skip
        return found if packed else found[0] + found[1].sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n_tokens in (300, 5000):
        of_heads = ((heads,),) * 3
        shapes = (1, n_tokens, 2 * inner + 2 * keys + heads), (inner + 2 * keys, 4), *of_heads, (inner,)
        leaves = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        places = torch.empty(2, n_tokens, dtype=torch.int32, device="meta")
        for t in (leaves[0], places):
            torch._dynamo.mark_dynamic(t, 1)
        compiled(*leaves, places).sum().backward()
        assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    assert len(graphs) == 1
    assert len(changed) > 14
    assert not [ops for ops in changed if "placeholder" in ops]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kda_is_one_graph_that_changes_no_input(packed, h100):
    graphs, changed, backend = recording_backend()

    def step(query, key, value, decay, beta, places):
        documents = Documents(*places) if packed else None
        return kda(query, key, value, decay, beta, l2_norm=True, documents=documents)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n_tokens in (300, 5000):
        shapes = *((1, n_tokens, 2, 32),) * 4, (1, n_tokens, 2)
        leaves = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        places = torch.empty(2, n_tokens, dtype=torch.int32, device="meta")
        for t in (*leaves, places):
            torch._dynamo.mark_dynamic(t, 1)
        compiled(*leaves, places).sum().backward()
        assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    assert len(graphs) == 1
    assert len(changed) > 10
    assert not [ops for ops in changed if "placeholder" in ops]


@pytest.mark.slow
@pytest.mark.parametrize("products", ["triton", "grouped_mm", None])
def test_experts_are_one_graph_that_changes_no_input(products, h100, monkeypatch):
    """With LoRA, whose product is added in place, on trained and on made weights."""
    monkeypatch.setattr(tiles, "LOOP_PRODUCT", 1)  # a call that is not compiled would wait for the GPU
    graphs, changed, backend = recording_backend()

    def step(x, weights, gate_up, down, a, b, index):
        gate_up = ExpertProjection(gate_up, lora=ExpertLora(a, b, 2.0))
        first = experts(x, index, weights, gate_up, down, products=products)
        return experts(first, index, weights, gate_up, down, products=products)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n_rows in (48, 24, 5000):
        shapes = (n_rows, HIDDEN), (n_rows, 2), (8, 96, HIDDEN), (8, HIDDEN, 48), (8, 16, HIDDEN), (8, 96, 16)
        leaves = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        compiled(*leaves, torch.empty(n_rows, 2, dtype=torch.int64, device="meta")).sum().backward()
        assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    assert len(graphs) <= 3
    assert len(changed) > 10
    assert not [ops for ops in changed if "placeholder" in ops]
