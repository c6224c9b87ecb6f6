"""AdamW of all parameters by one kernel in Triton, with fp32 masters of those in 16 bits.

    m ← β₁ m + (1 − β₁) g    v ← β₂ v + (1 − β₂) g²
    θ ← θ − η λ θ − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

Autocast casts fp32 weights to 16 bits and their gradients to fp32 in every step: 12 bytes a parameter beside AdamW's
28. A weight that is held in 16 bits beside its fp32 master is written by the kernel, which reads the gradient as it is:
28 bytes in all, and the same update.

Memory bounds it. m, v and masters lie one parameter after the other, each from the start of a program's block;
gradients and parameters stay where they are, and the kernel is told their addresses.

Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2; Micikevicius et al. 2018, "Mixed
Precision Training", section 3.1 (masters).
"""

import math
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from labkit.kernels.fused import DTYPES, runs_kernel

BLOCK = 1024  # elements of a program, 8 of a thread
ADDRESSES_A_LAUNCH = 64
LANGUAGE_DTYPES = dict(zip(DTYPES, (tl.float32, tl.bfloat16, tl.float16), strict=True))


@triton.jit
def write_addresses_kernel(addresses_ptr, first, values):
    for place in tl.static_range(len(values)):
        tl.store(addresses_ptr + first + place, values[place])


@triton.jit
def adamw_kernel(
    master_ptr, exp_avg_ptr, exp_avg_sq_ptr, addresses_ptr, blocks_ptr, spans_ptr, step_ptr,
    num_params, lr, beta1, beta2, log2_beta1, log2_beta2, eps, weight_decay, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program updates BLOCK elements of one parameter, of DTYPE; without masters, the parameter itself."""
    block = tl.program_id(0)
    number = tl.load(blocks_ptr + block)
    grad_address = tl.load(addresses_ptr + number)
    if grad_address != 0:
        start, end = tl.load(spans_ptr + 2 * number), tl.load(spans_ptr + 2 * number + 1)
        flat = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place, inside = flat - start, flat < end
        param_ptr = tl.load(addresses_ptr + num_params + number).to(tl.pointer_type(DTYPE))
        grad = tl.load(grad_address.to(tl.pointer_type(DTYPE)) + place, mask=inside, other=0.0).to(tl.float32)
        if master_ptr is None:
            theta = tl.load(param_ptr + place, mask=inside, other=0.0)
        else:
            theta = tl.load(master_ptr + flat)
        exp_avg, exp_avg_sq = tl.load(exp_avg_ptr + flat), tl.load(exp_avg_sq_ptr + flat)
        exp_avg += (grad - exp_avg) * (1 - beta1)
        exp_avg_sq += (grad * grad - exp_avg_sq) * (1 - beta2)
        # In fp64: in fp32 the first 1 − β₂ᵗ would keep four digits.
        step = tl.load(step_ptr).to(tl.float64)
        correction1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
        correction2 = (1 - tl.exp2(step * log2_beta2)).to(tl.float32)
        theta -= lr * weight_decay * theta
        theta -= lr / correction1 * exp_avg / (tl.sqrt(exp_avg_sq / correction2) + eps)
        tl.store(exp_avg_ptr + flat, exp_avg)
        tl.store(exp_avg_sq_ptr + flat, exp_avg_sq)
        if master_ptr is not None:
            tl.store(master_ptr + flat, theta)
        tl.store(param_ptr + place, theta.to(DTYPE), mask=inside)


class _Bucket:
    """Parameters of one group, device and dtype, and their state, which one launch updates."""

    def __init__(self, group: dict, params: list[Tensor], state: dict):
        self.group, self.params, self.written = group, params, []
        like = {"dtype": torch.float32, "device": params[0].device}
        num_blocks = [-(-p.numel() // BLOCK) for p in params]
        ends = [BLOCK * number for number in accumulate(num_blocks)]
        spans = [(end - BLOCK * number, end - BLOCK * number + p.numel())
                 for p, number, end in zip(params, num_blocks, ends, strict=True)]  # fmt: skip
        self.step_count = torch.zeros((), **like)
        self.exp_avg, self.exp_avg_sq = (torch.zeros(ends[-1], **like) for _ in range(2))
        self.master = torch.zeros(ends[-1], **like) if params[0].element_size() == 2 else None
        numbers = torch.arange(len(params), dtype=torch.int32)
        self.blocks = numbers.repeat_interleave(torch.tensor(num_blocks)).to(params[0].device)
        self.spans = torch.tensor(spans, device=params[0].device)
        self.addresses = torch.zeros(2 * len(params), dtype=torch.int64, device=params[0].device)
        flat = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "master": self.master}
        for p, (start, end) in zip(params, spans, strict=True):
            state[p] = {name: x[start:end].view(p.shape) for name, x in flat.items() if x is not None}
            if self.master is not None:
                state[p]["master"].copy_(p.detach())
            state[p]["step"] = self.step_count

    def update(self) -> None:
        group, (beta1, beta2) = self.group, self.group["betas"]
        # A gradient that autograd makes is as dense as its parameter.
        grads = [None if p.grad is None else p.grad.contiguous() for p in self.params]
        self._write_addresses([0 if x is None else x.data_ptr() for x in (*grads, *self.params)])
        self.step_count += 1
        adamw_kernel[(len(self.blocks),)](
            self.master, self.exp_avg, self.exp_avg_sq, self.addresses, self.blocks, self.spans, self.step_count,
            len(self.params), group["lr"], beta1, beta2, math.log2(beta1), math.log2(beta2), group["eps"],
            group["weight_decay"], DTYPE=LANGUAGE_DTYPES[self.params[0].dtype], BLOCK=BLOCK,
        )  # fmt: skip

    def _write_addresses(self, addresses: list[int]) -> None:
        """Puts addresses on the device where others stand, as arguments of launches, which a CUDA graph keeps."""
        is_captured = self.addresses.is_cuda and torch.cuda.is_current_stream_capturing()
        if addresses == self.written and not is_captured:
            return
        for first in range(0, len(addresses), ADDRESSES_A_LAUNCH):
            part = tuple(addresses[first : first + ADDRESSES_A_LAUNCH])
            write_addresses_kernel[(1,)](self.addresses, first, part)
        self.written = addresses


class FusedAdamW(torch.optim.Optimizer):
    """AdamW that updates all parameters of a group, device and dtype in one launch; others stay without a gradient.

    Args:
        params: parameters or groups of them, dense, of fp32, bf16 or fp16. Those in 16 bits get an fp32 master, which
            starts as their copy and is what trains; the parameter is the master rounded.
        lr, betas, eps, weight_decay: as torch.optim.AdamW has them. A CUDA graph keeps the values it was captured with.

    Each parameter's state holds exp_avg, exp_avg_sq and master, fp32 and shaped as it, and step, one fp32 number that
    counts the calls for all that are updated together. Without a GPU the formula runs in plain PyTorch.

    Raises:
        ValueError: a parameter that is not dense or of another dtype; a value out of its range.

    Error budget: an update is off by at most a few fp32 roundings of itself.
    """

    def __init__(self, params, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2):
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if not all(0 < beta < 1 for beta in betas):
            raise ValueError(f"betas must be between 0 and 1, got {tuple(betas)}")
        self.buckets: list[_Bucket] = []
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group, alike = self.param_groups[-1], {}
        for p in group["params"]:
            if p.dtype not in DTYPES or not p.is_contiguous():
                accepted = ", ".join(map(str, DTYPES))
                raise ValueError(f"parameters must be dense and of {accepted}; got {p.dtype}, strides {p.stride()}")
            if p.numel():
                alike.setdefault((p.device, p.dtype), []).append(p)
        self.buckets += [_Bucket(group, params, self.state) for params in alike.values()]

    def load_state_dict(self, state_dict: dict) -> None:
        """Copies a state into the tensors that are there; PyTorch would round masters to their parameters' dtype."""
        own = self.state_dict()
        for number, saved in state_dict["state"].items():
            for name, tensor in saved.items():
                own["state"][number][name].copy_(tensor)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient; returns what `closure` does, None without one."""
        loss = torch.enable_grad()(closure)() if closure else None
        for bucket in self.buckets:
            if runs_kernel(bucket.exp_avg):
                with torch.cuda.device_of(bucket.exp_avg):
                    bucket.update()
            else:
                self._update_plainly(bucket)
        return loss

    def _update_plainly(self, bucket: _Bucket) -> None:
        group, (beta1, beta2) = bucket.group, bucket.group["betas"]
        bucket.step_count += 1
        step = int(bucket.step_count)
        for p in (p for p in bucket.params if p.grad is not None):
            state, grad = self.state[p], p.grad.float()
            theta = state.get("master", p)
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(grad * grad, 1 - beta2)
            theta.mul_(1 - group["lr"] * group["weight_decay"])
            scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            theta.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**step))
            p.copy_(theta)
