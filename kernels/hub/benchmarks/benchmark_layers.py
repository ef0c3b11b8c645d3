"""Run by `kernels benchmark REPO`: forward and backward of the kernels beside plain PyTorch.

Sizes are those of Llama-3.1-8B at 8,192 tokens; small ones on a CPU, where the references run.
"""

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional


class Training:
    """Each benchmark leaves the gradient of its first input in `out`, which the runner compares with `verify_*`."""

    seed = 0

    def leaf(self, *shape: int) -> torch.Tensor:
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        return torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True)

    def size(self, of_gpu: int, of_cpu: int) -> int:
        return of_cpu if self.device == "cpu" else of_gpu

    def gradient(self, output: torch.Tensor, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(output.float().mean() * 16, (first, *others))[0]


class NormBenchmark(Training, Benchmark):
    def setup(self) -> None:
        self.x, self.weight = self.leaf(self.size(8192, 16), self.size(4096, 64)), self.leaf(self.size(4096, 64))

    def benchmark_rms_norm(self) -> None:
        self.out = self.gradient(self.kernel.rms_norm(self.x, self.weight), self.x, self.weight)

    def verify_rms_norm(self) -> torch.Tensor:
        y = functional.rms_norm(self.x, self.weight.shape, self.weight, 1e-6)
        return self.gradient(y, self.x, self.weight)


class MlpBenchmark(Training, Benchmark):
    def setup(self) -> None:
        shape = self.size(8192, 16), self.size(14336, 64)
        self.gate, self.up = self.leaf(*shape), self.leaf(*shape)

    def benchmark_swiglu(self) -> None:
        self.out = self.gradient(self.kernel.swiglu(self.gate, self.up), self.gate, self.up)

    def verify_swiglu(self) -> torch.Tensor:
        return self.gradient(functional.silu(self.gate) * self.up, self.gate, self.up)


class RotaryBenchmark(Training, Benchmark):
    def setup(self) -> None:
        length, head_dim = self.size(8192, 16), self.size(128, 16)
        self.q, self.k = self.leaf(1, 32, length, head_dim), self.leaf(1, 8, length, head_dim)
        angles = torch.outer(torch.arange(length), 10000 ** -(torch.arange(0, head_dim, 2) / head_dim))
        angles = torch.cat((angles, angles), -1)[None].to(self.device)
        self.cos, self.sin = angles.cos().to(self.q.dtype), angles.sin().to(self.q.dtype)

    def benchmark_apply_rope(self) -> None:
        q, k = self.kernel.apply_rope(self.q, self.k, self.cos, self.sin)
        self.out = self.gradient(torch.cat((q, k), 1), self.q, self.k)

    def verify_apply_rope(self) -> torch.Tensor:
        def rotate(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, -1)
            return x * self.cos + torch.cat((-high, low), -1) * self.sin

        return self.gradient(torch.cat((rotate(self.q), rotate(self.k)), 1), self.q, self.k)


class AttentionBenchmark(Training, Benchmark):
    """Two documents of one half of the row each; PyTorch's attention computes them as two rows."""

    def setup(self) -> None:
        self.length = self.size(8192, 32)
        self.q, self.k, self.v = (self.leaf(self.length, heads, self.size(128, 16)) for heads in (32, 8, 8))
        self.edges = torch.tensor([0, self.length // 2, self.length], dtype=torch.int32, device=self.device)

    def benchmark_packed_attention(self) -> None:
        half = self.length // 2
        attention = self.kernel.flash_attn_varlen_func
        y = attention(self.q, self.k, self.v, self.edges, self.edges, half, half, causal=True)
        self.out = self.gradient(y, self.q, self.k, self.v)

    def verify_packed_attention(self) -> torch.Tensor:
        rows = (t.unflatten(0, (2, -1)).transpose(1, 2) for t in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return self.gradient(y.transpose(1, 2).flatten(0, 1), self.q, self.k, self.v)
