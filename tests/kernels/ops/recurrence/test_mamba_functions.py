"""ssd_step, and ssd under mamba-ssm's names: states, documents, mixers of transformers, what is refused."""

import pytest
import torch
from ligertune_kernels import ssd, ssd_step, ssd_step_reference, ssd_with_states
from ligertune_kernels.ops.recurrence.ssd.mamba_functions import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    selective_state_update,
)
from support.kernels.attention_runs import documents_of
from support.kernels.recurrence_loops import convolution_loop, ssd_loop
from torch.nn import functional as F

LENGTHS = (4, 1, 9, 6)
DOCUMENTS = documents_of(LENGTHS, torch.device("cpu"))
BOUNDS = torch.tensor((0, *LENGTHS)).cumsum(0)
FORMS = {
    "cu_seqlens": BOUNDS.int(),
    "cu_seq_lens_q": BOUNDS,
    "document_places": torch.stack((DOCUMENTS.starts, DOCUMENTS.ends)),
    "seq_idx": torch.tensor([3, 1, 2, 1]).repeat_interleave(torch.tensor(LENGTHS))[None].int(),  # neighbours differ
}
HEADS, GROUPS, HEAD_DIM, STATE_DIM = 4, 2, 20, 12  # rows of a head in two programs of a step
INNER = HEADS * HEAD_DIM
MIXED = INNER + 2 * GROUPS * STATE_DIM
TAPS = 4


def tensors(
    batch: int, n_tokens: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return the tensors of `ssd`."""
    keys = (batch, n_tokens, GROUPS, STATE_DIM)
    return {
        "x": torch.randn(batch, n_tokens, HEADS, HEAD_DIM, device=device, dtype=dtype),
        "dt": torch.randn(batch, n_tokens, HEADS, device=device, dtype=dtype),
        "A": -torch.rand(HEADS, device=device),
        "B": torch.randn(keys, device=device, dtype=dtype),
        "C": torch.randn(keys, device=device, dtype=dtype),
        "D": torch.randn(HEADS, device=device),
        "z": torch.randn(batch, n_tokens, HEADS, HEAD_DIM, device=device, dtype=dtype),
        "dt_bias": torch.randn(HEADS, device=device),
    }


def token(given: dict[str, torch.Tensor], t: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one token, views of those of a row."""
    return {name: value[:, t] if value.ndim > 2 else value for name, value in given.items()}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 5e-3)])
@pytest.mark.parametrize("columns", [False, True])
def test_one_token_after_another_equals_a_loop_over_the_row(dtype, tolerance, columns, device) -> None:
    given = tensors(2, 5, device, dtype)
    if columns:
        given |= {"D": torch.randn(HEADS, HEAD_DIM, device=device)}
        del given["z"], given["dt_bias"]
        given["dt"] = given["dt"].abs()
    options = {"dt_softplus": not columns, "dt_limit": (0.1, 2.0)}
    state = torch.randn(2, HEADS, HEAD_DIM, STATE_DIM, device=device)
    wide = {name: t.double() for name, t in given.items()}
    expected, last = ssd_loop(**wide, initial_state=state.double(), **options)
    out = torch.stack([ssd_step(state, **token(given, t), **options) for t in range(5)], 1)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), last, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_of_any_strides_and_dtype_change_in_place(dtype, device) -> None:
    given = token(tensors(2, 1, device), 0)
    state = torch.randn(2, HEADS, HEAD_DIM, STATE_DIM, device=device, dtype=dtype)
    strided = state.mT.contiguous().mT
    found = ssd_step(state, **given), ssd_step(strided, **given)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(state, strided, rtol=2e-3, atol=1e-4 if dtype is torch.float32 else 2e-3)


def test_a_step_has_no_gradient_and_takes_wide_states_and_no_row(device) -> None:
    given = token(tensors(1, 1, device), 0)
    given["x"].requires_grad_()
    state = torch.zeros(1, HEADS, HEAD_DIM, STATE_DIM, device=device)
    assert not ssd_step(state, **given, dt_softplus=True).requires_grad and state.any()
    wide = torch.randn(1, GROUPS, 300, device=device)
    wide_state = torch.zeros(1, HEADS, HEAD_DIM, 300, device=device)
    one = ssd_step(wide_state, given["x"], given["dt"], given["A"], wide, wide)
    wide_state.zero_()
    assert torch.equal(one, ssd_step_reference(wide_state, given["x"].detach(), given["dt"], given["A"], wide, wide))
    none = {name: t[:0] if t.ndim > 1 else t for name, t in given.items()}
    assert ssd_step(state[:0], **none).shape == (0, HEADS, HEAD_DIM)


def test_a_step_under_autocast_has_its_dtype(device) -> None:
    given = token(tensors(1, 1, device), 0)
    state = torch.zeros(1, HEADS, HEAD_DIM, STATE_DIM, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert ssd_step(state, **given).dtype is torch.bfloat16
    assert state.dtype is torch.float32


@pytest.mark.parametrize(
    "change, message",
    [
        ({"state": torch.zeros(1, 4, 12, 8)}, r"state \(1, 4, 12, 8\); expected .* \(B, H, P, 12\)"),
        ({"dt": torch.zeros(1, 3)}, r"ssd_step: dt is \(1, 3\); expected \(1, 4\)"),
        ({"B": torch.zeros(1, 3, 12), "C": torch.zeros(1, 3, 12)}, "ssd_step: 4 heads and 3 groups"),
        ({"x": torch.zeros(1, 1, 4, 8)}, "ssd_step: x"),
    ],
)
def test_tensors_of_a_step_that_do_not_fit_are_refused(change, message) -> None:
    given = token(tensors(1, 1, torch.device("cpu")), 0) | {"state": torch.zeros(1, HEADS, HEAD_DIM, STATE_DIM)}
    with pytest.raises(ValueError, match=message):
        ssd_step(**given | change)


@pytest.mark.parametrize("form", FORMS)
def test_documents_of_the_scan_in_each_form(form) -> None:
    given = tensors(1, sum(LENGTHS), torch.device("cpu"))
    out = mamba_chunk_scan_combined(**given, chunk_size=256, dt_softplus=True, **{form: FORMS[form]})
    torch.testing.assert_close(out, ssd(**given, dt_softplus=True, documents=DOCUMENTS))


def test_states_and_limits_of_the_scan() -> None:
    given = tensors(2, 9, torch.device("cpu"))
    state = torch.randn(2, HEADS, HEAD_DIM, STATE_DIM)
    limits = {"dt_softplus": True, "dt_limit": (0.1, 1.0)}
    expected = ssd_with_states(**given, **limits, initial_state=state)
    given = [given.pop(name) for name in ("x", "dt", "A", "B", "C")], given
    found = mamba_chunk_scan_combined(
        *given[0], 256, **given[1], **limits, initial_states=state, return_final_states=True, position_ids=None
    )
    torch.testing.assert_close(found, expected)
    alone = mamba_chunk_scan_combined(*given[0], 256, **given[1], **limits, initial_states=state)
    torch.testing.assert_close(alone, expected[0])


def expanded(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the numbers of heads of a step expanded to columns, as transformers' models pass them."""
    wide = {name: given[name][..., None].expand(*given[name].shape, HEAD_DIM) for name in ("dt", "D", "dt_bias")}
    return given | wide | {"A": given["A"][:, None, None].expand(-1, HEAD_DIM, STATE_DIM)}


def test_expanded_numbers_of_heads_and_their_copies_are_taken() -> None:
    given = token(tensors(2, 1, torch.device("cpu")), 0)
    states = torch.randn(2, HEADS, HEAD_DIM, STATE_DIM).repeat(3, 1, 1, 1, 1)
    expected = ssd_step(states[0], **given, dt_softplus=True)
    wide = expanded(given)
    assert torch.equal(selective_state_update(states[1], **wide, dt_softplus=True), expected)
    copies = {name: t.contiguous() for name, t in wide.items()}
    assert torch.equal(selective_state_update(states[2], **copies, dt_softplus=True), expected)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


@pytest.mark.parametrize("name", ["dt", "A", "dt_bias"])
def test_numbers_that_differ_within_a_head_are_refused(name) -> None:
    given = expanded(token(tensors(1, 1, torch.device("cpu")), 0))
    state = torch.zeros(1, HEADS, HEAD_DIM, STATE_DIM)
    varied = given[name].clone()
    varied.view(-1)[-1] += 1
    with pytest.raises(ValueError, match=f"selective_state_update: {name} differs within a head"):
        selective_state_update(state, **given | {name: varied})
    meta = expanded(token(tensors(1, 1, torch.device("meta")), 0)) | {name: torch.empty(varied.shape, device="meta")}
    with pytest.raises(ValueError, match=f"selective_state_update: {name} may differ within a head"):
        selective_state_update(state.to("meta"), **meta)
    with pytest.raises(ValueError, match=f"selective_state_update: {name} is "):
        selective_state_update(state, **given | {name: varied[..., 0]})


def test_numbers_expanded_to_columns_of_the_state_alone_are_refused() -> None:
    given = expanded(token(tensors(1, 1, torch.device("cpu")), 0))
    of_rows = torch.rand(HEADS, HEAD_DIM, 1).neg().expand(-1, -1, STATE_DIM)
    with pytest.raises(ValueError, match="selective_state_update: A differs within a head"):
        selective_state_update(torch.zeros(1, HEADS, HEAD_DIM, STATE_DIM), **given | {"A": of_rows})


@pytest.mark.parametrize("function", [mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined])
def test_documents_with_states_are_refused(function) -> None:
    given = tensors(1, sum(LENGTHS), torch.device("cpu"))
    if function is mamba_split_conv1d_scan_combined:
        given = mixer(torch.device("cpu"))[0] | {"zxbcdt": torch.randn(1, sum(LENGTHS), INNER + MIXED + HEADS)}
    with pytest.raises(ValueError, match=f"{function.__name__}: packed documents .* leave no state"):
        function(**given, return_final_states=True, seq_idx=FORMS["seq_idx"])


def test_what_the_functions_do_not_compute_is_refused() -> None:
    given = tensors(1, 3, torch.device("cpu"))
    with pytest.raises(ValueError, match="return_varlen_states is given, which these kernels do not compute"):
        mamba_chunk_scan_combined(**given, return_varlen_states=True)
    with pytest.raises(TypeError, match="unknown argument seq_index; did you mean seq_idx"):
        mamba_chunk_scan_combined(**given, seq_index=FORMS["seq_idx"])
    step = expanded(token(given, 0))
    state = torch.zeros(1, HEADS, HEAD_DIM, STATE_DIM)
    with pytest.raises(ValueError, match="state_batch_indices is given"):
        selective_state_update(state, **step, state_batch_indices=torch.zeros(1))
    with pytest.raises(ValueError, match=r"state \(4, 20, 12\) and x \(4, 20\); expected \(B, H, P, N\)"):
        selective_state_update(state[0], **step | {"x": step["x"][0]})
    with pytest.raises(TypeError, match="selective_state_update: A is None"):
        selective_state_update(state, **step | {"A": None})
    given = mixer(torch.device("cpu"))[0] | {"zxbcdt": torch.randn(1, 3, INNER + MIXED + HEADS)}
    for change, message in (
        ({"zxbcdt": torch.randn(1, 3, 50)}, r"zxbcdt is \(1, 3, 50\), with 4 heads, 80 columns of heads and 2 groups"),
        ({"headdim": None}, r"D is \(4,\) and headdim None"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
    ):
        with pytest.raises(ValueError, match=message):
            mamba_split_conv1d_scan_combined(**given | change)


def mixer(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return arguments of a mixer but its projection: tensors and others; and its norm's and projection's weights."""
    given = {
        "conv1d_weight": torch.randn(MIXED, TAPS, device=device),
        "conv1d_bias": torch.randn(MIXED, device=device),
        "dt_bias": torch.randn(HEADS, device=device),
        "A": -torch.rand(HEADS, device=device),
        "D": torch.randn(HEADS, device=device),
        "headdim": HEAD_DIM,
        "ngroups": GROUPS,
    }
    more = {
        "rmsnorm_weight": torch.randn(INNER, device=device),
        "outproj_weight": torch.randn(10, INNER, device=device),
        "outproj_bias": torch.randn(10, device=device),
    }
    return given, more


def composed(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, norm_first, lengths, **weights) -> torch.Tensor:
    """Return a mixer's outputs by loops over tokens, as its papers and mamba-ssm describe it."""
    z, xbc, dt = zxbcdt.split((INNER, MIXED, HEADS), -1)
    xbc = convolution_loop(xbc.mT, conv1d_weight, conv1d_bias, silu=True, lengths=lengths).mT
    x, b, c = xbc.split((INNER, GROUPS * STATE_DIM, GROUPS * STATE_DIM), -1)
    b, c = (t.unflatten(-1, (GROUPS, STATE_DIM)) for t in (b, c))
    x = x.unflatten(-1, (HEADS, HEAD_DIM))
    y, _ = ssd_loop(x, dt, A, b, c, D, None, dt_bias, dt_softplus=True, lengths=lengths)
    y = y.flatten(-2)
    if not weights:
        return y * F.silu(z)
    y = y if norm_first else y * F.silu(z)
    groups = y.unflatten(-1, (GROUPS, -1))
    normed = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * weights["rmsnorm_weight"]
    normed = normed * F.silu(z) if norm_first else normed
    return normed @ weights["outproj_weight"].mT + weights["outproj_bias"]


@pytest.mark.parametrize("norm_first", [None, False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mixer_and_its_gradients(norm_first, packed) -> None:
    """norm_first: None without a norm and an output projection."""
    device = torch.device("cpu")
    given, weights = mixer(device)
    weights = {} if norm_first is None else weights
    sizes = {"headdim": given.pop("headdim"), "ngroups": given.pop("ngroups")}
    given |= {"zxbcdt": torch.randn(1, sum(LENGTHS), INNER + MIXED + HEADS)} | weights
    options = {} if norm_first is None else {"norm_before_gate": norm_first, "rmsnorm_eps": 1e-5}
    options |= {"seq_idx": FORMS["seq_idx"]} if packed else {}
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    out = mamba_split_conv1d_scan_combined(**leaves, chunk_size=256, **sizes, **options)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    expected = composed(**wide, norm_first=norm_first, lengths=LENGTHS if packed else None)
    truth = torch.autograd.grad(expected, list(wide.values()), grad.double())
    for ours, theirs in zip((out, *found), (expected, *truth), strict=True):
        assert (ours.double() - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1)


def test_the_functions_compute_what_transformers_computes_without_them() -> None:
    """Nemotron-H's mixer, called as in training, and its step for one token."""
    modelling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = modelling.NemotronHConfig(
        hidden_size=24, mamba_num_heads=HEADS, mamba_head_dim=HEAD_DIM, n_groups=GROUPS, ssm_state_size=STATE_DIM,
        layers_block_type=["mamba"], chunk_size=8, vocab_size=50,
    )  # fmt: skip
    layer = modelling.NemotronHMamba2Mixer(config, layer_idx=0)
    with torch.no_grad():
        layer.A_log.uniform_(-1, 1)
    hidden = torch.randn(2, 11, 24)
    expected = layer.eval()(hidden)
    projected = layer.in_proj(hidden)
    A = -layer.A_log.exp()
    limits = {"dt_limit": layer.time_step_limit}
    out = mamba_split_conv1d_scan_combined(
        projected, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.dt_bias, A, D=layer.D, chunk_size=8,
        activation=layer.activation, rmsnorm_weight=layer.norm.weight, rmsnorm_eps=layer.norm.variance_epsilon,
        outproj_weight=layer.out_proj.weight, outproj_bias=layer.out_proj.bias, headdim=HEAD_DIM, ngroups=GROUPS,
        norm_before_gate=False, return_final_states=False, **limits,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

    step = expanded(token(tensors(2, 1, torch.device("cpu")), 0))
    theirs, ours = torch.randn(1, 2, HEADS, HEAD_DIM, STATE_DIM).repeat(2, 1, 1, 1, 1)
    positional = [step.pop(name) for name in ("x", "dt", "A", "B", "C")]
    expected = modelling.mamba2_selective_state_update(theirs, *positional, **step, dt_softplus=True)
    found = selective_state_update(ours, *positional, **step, dt_softplus=True, use_cache=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
