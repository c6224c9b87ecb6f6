"""Attention calls with random tensors, and what they give in fp64, which the results of
implementations are held to.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.configs import Rivalry
from labkit.device import Device
from labkit.experiments.sections import empty_cache
from labkit.kernels.reference import attention_reference
from labkit.numerics import Verdict, judge, tensor_dtype

ORACLE_SCORES = 2**27
"""fp64 scores that are held at once (1 GiB a matrix), whatever the length."""


@dataclass(frozen=True)
class Problem:
    """The tensors of one attention call, and its results in fp64 and by the eager formula in their
    dtype.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    reference: dict[str, Tensor]
    eager: dict[str, Tensor]

    def judge(self, name: str, value: Tensor) -> Verdict:
        reference, eager = self.reference[name], self.eager[name]
        return judge(
            name, value, reference, eager, dtype=self.grad_out.dtype, num_terms=value.shape[-2]
        )


def draw(device_kind: str, precision: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Returns random normal tensors."""
    generator = torch.Generator(device_kind).manual_seed(0)
    return [
        torch.randn(shape, generator=generator, device=device_kind).to(tensor_dtype(precision))
        for shape in shapes
    ]


@functools.lru_cache(maxsize=1)
def attention_problem(device: Device, shape: Rivalry, precision: str) -> Problem:
    """Returns the problem of a shape; the last one is kept, for a shape's cases follow one
    another.
    """
    empty_cache(device)
    size = (shape.batch, shape.heads, shape.length, shape.d_head)
    *inputs, grad_out = draw(device.kind, precision, *4 * [size])
    reference, eager = expected((*inputs, grad_out), shape.causal)
    return Problem(tuple(x.requires_grad_() for x in inputs), grad_out, reference, eager)


def expected(
    tensors: Sequence[Tensor], causal: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what q, k, v and the output's gradient give in fp64 and, by the same formula, in
    their own dtype.
    """
    place = fp64_device(tensors[0].device.type)
    return tuple(
        by_formula(*(x.to(place, dtype) for x in tensors), causal=causal)
        for dtype in (torch.float64, tensors[0].dtype)
    )


def fp64_device(device_kind: str) -> str:
    """Returns where fp64 is computed: on the device, but mps has none."""
    return "cpu" if device_kind == "mps" else device_kind


def by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    causal: bool = False,
    num_scores: int = ORACLE_SCORES,
) -> dict[str, Tensor]:
    """Returns "out", "dq", "dk" and "dv" by the eager formula, as fp64, at most `num_scores` scores
    at once.

    q, k, v, grad_out: (..., length, D), of the dtype to compute in.
    """
    length = q.shape[-2]
    num_rows = max(1, num_scores // (q.shape[:-2].numel() * length))
    results = {
        name: torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for name in ("out", "dq", "dk", "dv")
    }
    for begin in range(0, length, num_rows):
        rows = slice(begin, min(begin + num_rows, length))
        # Aligned to the bottom right, the mask of the last rows over the keys up to them is theirs.
        keys = slice(0, rows.stop if causal else length)
        leaves = [
            x[..., part, :].detach().requires_grad_()
            for x, part in ((q, rows), (k, keys), (v, keys))
        ]
        out = attention_reference(*leaves, causal=causal)
        grads = torch.autograd.grad(out, leaves, grad_out[..., rows, :])
        results["out"][..., rows, :] = out.detach()
        results["dq"][..., rows, :] = grads[0]
        results["dk"][..., keys, :] += grads[1]
        results["dv"][..., keys, :] += grads[2]
    return results
