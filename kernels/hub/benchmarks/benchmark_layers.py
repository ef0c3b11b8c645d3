"""Run by `kernels benchmark REPO`: the time of forward and backward of kernels and of plain PyTorch.

Sizes are those of Llama-3.1-8B at 8,192 tokens in bf16; small ones in fp32 on a CPU, where the references run.
"""

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional


class Training:
    """Each benchmark leaves the gradient of its first input in `out`, which the runner compares with `verify_*`.

    The runner allows a difference of 0.01, so the gradients of the outputs keep those of the inputs below one: there
    bf16 rounds by less.
    """

    seed = 0
    slope = 0.05

    def leaf(self, *shape: int) -> torch.Tensor:
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        return torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True)

    def size(self, of_gpu: int, of_cpu: int) -> int:
        return of_cpu if self.device == "cpu" else of_gpu

    def train_on(self, *inputs: torch.Tensor, outputs: int = 1) -> None:
        """Set the inputs. The first ones have the shapes of the outputs."""
        self.inputs = inputs
        self.slopes = [torch.full_like(t, self.slope) for t in inputs[:outputs]]

    def gradient(self, *outputs: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(outputs, self.inputs, self.slopes)[0]


class NormBenchmark(Training, Benchmark):
    def setup(self) -> None:
        self.train_on(self.leaf(self.size(8192, 16), self.size(4096, 64)), self.leaf(self.size(4096, 64)))

    def benchmark_rms_norm(self) -> None:
        self.out = self.gradient(self.kernel.rms_norm(*self.inputs))

    def verify_rms_norm(self) -> torch.Tensor:
        x, weight = self.inputs
        return self.gradient(functional.rms_norm(x, weight.shape, weight, 1e-6))


class MlpBenchmark(Training, Benchmark):
    def setup(self) -> None:
        shape = self.size(8192, 16), self.size(14336, 64)
        self.train_on(self.leaf(*shape), self.leaf(*shape))

    def benchmark_swiglu(self) -> None:
        self.out = self.gradient(self.kernel.swiglu(*self.inputs))

    def verify_swiglu(self) -> torch.Tensor:
        gate, up = self.inputs
        return self.gradient(functional.silu(gate) * up)


class RotaryBenchmark(Training, Benchmark):
    def setup(self) -> None:
        length = self.size(8192, 16)
        head_dim = self.size(128, 16)
        self.train_on(self.leaf(1, 32, length, head_dim), self.leaf(1, 8, length, head_dim), outputs=2)
        angles = torch.outer(torch.arange(length), 10000 ** -(torch.arange(0, head_dim, 2) / head_dim))
        angles = torch.cat((angles, angles), -1)[None].to(self.device)
        self.cos, self.sin = (t.to(self.inputs[0].dtype) for t in (angles.cos(), angles.sin()))

    def benchmark_apply_rope(self) -> None:
        self.out = self.gradient(*self.kernel.apply_rope(*self.inputs, self.cos, self.sin))

    def verify_apply_rope(self) -> torch.Tensor:
        def rotate(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, -1)
            return x * self.cos + torch.cat((-high, low), -1) * self.sin

        return self.gradient(*map(rotate, self.inputs))


class AttentionBenchmark(Training, Benchmark):
    """Two documents of one half of the row each; PyTorch's attention computes them as two rows."""

    slope = 0.03

    def setup(self) -> None:
        length = self.size(8192, 32)
        self.train_on(*(self.leaf(length, heads, self.size(128, 16)) for heads in (32, 8, 8)))
        self.edges = torch.tensor([0, length // 2, length], dtype=torch.int32, device=self.device)

    def benchmark_packed_attention(self) -> None:
        half = len(self.inputs[0]) // 2
        attention = self.kernel.flash_attn_varlen_func
        self.out = self.gradient(attention(*self.inputs, self.edges, self.edges, half, half, causal=True))

    def verify_packed_attention(self) -> torch.Tensor:
        rows = (t.unflatten(0, (2, -1)).transpose(1, 2) for t in self.inputs)
        y = functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return self.gradient(y.transpose(1, 2).flatten(0, 1))
