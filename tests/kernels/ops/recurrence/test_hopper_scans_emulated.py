"""The scans of gated_delta_rule for Hopper on a CPU, with warps that run in random order (gluon_emulator.py)."""

from types import ModuleType

import pytest
import torch
from support.kernels.gluon_emulator import Function, emulated
from torch import Tensor

WIDTH, CHUNK, PART = 128, 64, 128
GROUP = 2  # value heads of a key head
ROUNDING = 2**-11  # of float16
ROUNDINGS = 8  # at most as many lie between an input and a result
DOCUMENTS = [
    pytest.param((200,), id="one document, which ends in a chunk"),
    pytest.param((70, 1, 90, 64, 31, 192), id="over parts of a row, within a chunk, as long as it"),
    pytest.param((300, 20), id="a part in which none begins"),
]


@pytest.fixture(scope="module")
def scans() -> ModuleType:
    with emulated("ligertune_kernels.ops.recurrence.hopper_scans") as module:
        return module


class Row:
    """Random inputs of the scans of one key head, in whole chunks, and what each chunk takes by the definitions."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.n_tokens = sum(lengths)
        self.n_chunks = -(-self.n_tokens // CHUNK)
        self.generator = torch.Generator().manual_seed(0)
        ends = torch.tensor(lengths).cumsum(0)
        self.ends = ends.repeat_interleave(torch.tensor(lengths)).int()
        self.starts = (ends - torch.tensor(lengths)).repeat_interleave(torch.tensor(lengths)).int()
        self.q, self.k = (self.random(1, WIDTH) / WIDTH**0.5 for _ in range(2))
        self.v = self.random(GROUP, WIDTH)
        self.factors = torch.zeros(1, self.n_chunks, GROUP, 4, CHUNK)
        self.kept = torch.zeros(1, self.n_chunks, GROUP)
        self.t = torch.zeros(1, self.n_chunks, GROUP, CHUNK, CHUNK).half()
        for chunk in range(self.n_chunks):
            for head in range(GROUP):
                self._prepare(chunk, head)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(1, self.n_tokens, *shape, generator=self.generator).half()

    def tokens(self, chunk: int, head: int, *rows: Tensor) -> list[Tensor]:
        """Return the chunk's tokens of rows (1, T, heads, columns) in float64, and zeros after the last."""
        own = [row[0, chunk * CHUNK : (chunk + 1) * CHUNK, head % row.shape[2]].double() for row in rows]
        return [torch.nn.functional.pad(row, (0, 0, 0, CHUNK - len(row))) for row in own]

    def _prepare(self, chunk: int, head: int) -> None:
        first = chunk * CHUNK
        starts = self.starts[torch.arange(first, first + CHUNK).clamp(max=self.n_tokens - 1)]
        same = (starts[:, None] == starts[None, :]).tril()
        decays = -0.05 * torch.rand(CHUNK, generator=self.generator, dtype=torch.float64)
        logs = same.double() @ decays
        beta = torch.rand(CHUNK, generator=self.generator, dtype=torch.float64)
        (k,) = self.tokens(chunk, 0, self.k)
        between = (logs[:, None] - logs[None, :]).masked_fill(~same, float("-inf")).exp()
        system = (beta[:, None] * between * (k @ k.T)).tril(-1)
        reads = logs.exp() * (starts < max(first, 1))
        to_state = (logs[-1] - logs).exp() * (starts == starts[-1])
        self.factors[0, chunk, head] = torch.stack((to_state, -reads, -reads * beta, beta))
        self.kept[0, chunk, head] = reads[-1]
        self.t[0, chunk, head] = torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + system)

    def chunks(self, scans: ModuleType):
        part = PART if len(self.starts.unique()) > 1 else self.n_tokens
        several = part != self.n_tokens
        return scans.ScannedChunks(self.t, self.factors, self.kept, self.starts, self.ends, part, several)


def close(found: Tensor, expected: list[list[Tensor]]) -> None:
    """Compare (1, N, GROUP, ...) with one tensor per chunk and value head."""
    wanted = torch.stack([torch.stack(heads) for heads in expected])[None]
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error < ROUNDINGS * ROUNDING


@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_states_and_corrected_values(scans, monkeypatch, lengths) -> None:
    """In two random orders of the warps, which give the same bits."""
    row, runs = Row(lengths), []
    for seed in range(2):
        monkeypatch.setattr(Function, "seed", seed)
        states = torch.full((1, row.n_chunks, GROUP, WIDTH, WIDTH), float("nan")).half()
        corrected = torch.full((1, row.n_chunks, GROUP, CHUNK, WIDTH), float("nan")).half()
        scans.scan_states(row.k, row.v, row.chunks(scans), states, corrected)
        runs.append((states, corrected))
    assert all(map(torch.equal, *runs))
    state = [torch.zeros(WIDTH, WIDTH, dtype=torch.float64)] * GROUP
    before, values = [], []
    for chunk in range(row.n_chunks):
        before.append(list(state))
        values.append([])
        for head in range(GROUP):
            k, v = row.tokens(chunk, head, row.k, row.v)
            to_state, reads, _, beta = row.factors[0, chunk, head].double()
            errors = beta[:, None] * (v + reads[:, None] * (k @ state[head].T))
            values[-1].append(row.t[0, chunk, head].double() @ errors)
            added = (values[-1][-1] * to_state[:, None]).T @ k
            state[head] = row.kept[0, chunk, head].double() * state[head] + added
    close(corrected, values)
    read = row.starts[::CHUNK] < torch.arange(row.n_tokens)[::CHUNK]  # else a document begins with the chunk
    close(states[:, read], [heads for heads, is_read in zip(before, read, strict=True) if is_read])
    assert states.isfinite().all()  # multiplied by 0 where they are not read


@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_gradients_of_states(scans, monkeypatch, lengths) -> None:
    """In two random orders of the warps, which give the same bits."""
    row, runs = Row(lengths), []
    d_read = row.random(GROUP, WIDTH)
    local = torch.randn(1, row.n_chunks, GROUP, WIDTH, CHUNK, generator=row.generator).half()
    for chunk in range(row.n_chunks):  # as the kernel before it writes them
        own = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        d_read[0, own] *= (row.starts[own] < max(chunk * CHUNK, 1))[:, None, None]
        local[0, chunk, :, :, len(row.starts[own]) :] = 0
    for seed in range(2):
        monkeypatch.setattr(Function, "seed", seed)
        y, d_states = local.clone(), torch.full((1, row.n_chunks, GROUP, WIDTH, WIDTH), float("nan")).half()
        scans.scan_gradients(row.q, row.k, d_read, row.chunks(scans), y, d_states)
        runs.append((y, d_states))
    assert all(map(torch.equal, *runs))
    d_state = [torch.zeros(WIDTH, WIDTH, dtype=torch.float64)] * GROUP
    after, ys = [], []
    for chunk in reversed(range(row.n_chunks)):
        after.insert(0, list(d_state))
        ys.insert(0, [])
        for head in range(GROUP):
            q, k, read = row.tokens(chunk, head, row.q, row.k, d_read)
            to_state, _, from_state, _ = row.factors[0, chunk, head].double()
            d_corrected = local[0, chunk, head].double() + to_state * (d_state[head] @ k.T)
            found = d_corrected @ row.t[0, chunk, head].double()
            ys[0].append(found)
            d_state[head] = row.kept[0, chunk, head].double() * d_state[head] + read.T @ q + (from_state * found) @ k
    close(y, ys)
    close(d_states, after)
