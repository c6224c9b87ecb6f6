"""AdamW of all parameters by one kernel in Triton, with fp32 masters of those in 16 bits.

    m ← β₁ m + (1 − β₁) g    v ← β₂ v + (1 − β₂) g²
    θ ← θ − η λ θ − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

Autocast casts fp32 weights to 16 bits and their gradients to fp32 in every step: 12 bytes a
parameter beside AdamW's 28. A weight that is held in 16 bits beside its fp32 master is read and
written by the kernel, which reads the gradient as it is: 30 bytes in all, and the same update. Two
of them tell whether somebody else has written the weight, by loading a checkpoint say: where the
weight is not its master rounded, it becomes the master.

Memory bounds it. m, v and masters lie one parameter after the other, each from the start of a
program's block; gradients and parameters stay where they are, and the kernel is told their
addresses.

Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2; Micikevicius
et al. 2018, "Mixed Precision Training", section 3.1 (masters).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim.adamw import adamw

from labkit.kernels.fused import DTYPES, load_fp32, runs_kernel
from labkit.kernels.launch import Launcher

BLOCK = tl.constexpr(1024)  # elements of a program, 8 of a thread
ADDRESSES_A_LAUNCH = 64
LANGUAGE_DTYPES = dict(zip(DTYPES, (tl.float32, tl.bfloat16, tl.float16), strict=True))
# As wide as an address and aligned as one: Triton would compile anew for a 0 among addresses.
NO_GRADIENT = tl.constexpr(1 << 62)


@triton.jit
def write_addresses_kernel(addresses_ptr, first, values):
    for place in tl.static_range(len(values)):
        tl.store(addresses_ptr + first + place, values[place])


@triton.jit
def adamw_kernel(
    exp_avg_ptr,
    exp_avg_sq_ptr,
    master_ptr,
    addresses_ptr,
    blocks_ptr,
    spans_ptr,
    steps_ptr,
    num_params,
    lr,
    weight1,
    weight2,
    log2_beta1,
    log2_beta2,
    eps,
    decay,
    DTYPE: tl.constexpr,
):
    """One program updates BLOCK elements of one parameter, of DTYPE; without masters, the parameter
    itself.
    """
    block = tl.program_id(0)
    number = tl.load(blocks_ptr + block)
    grad_address = tl.load(addresses_ptr + number)
    if grad_address != NO_GRADIENT:
        start, end = tl.load(spans_ptr + 2 * number), tl.load(spans_ptr + 2 * number + 1)
        flat = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place, inside = flat - start, flat < end
        param_ptr = tl.load(addresses_ptr + num_params + number).to(tl.pointer_type(DTYPE))
        grad = load_fp32(grad_address.to(tl.pointer_type(DTYPE)) + place, inside)
        theta = load_fp32(param_ptr + place, inside)
        if master_ptr is not None:
            master = tl.load(master_ptr + flat)
            theta = tl.where(master.to(DTYPE).to(tl.float32) == theta, master, theta)
        exp_avg, exp_avg_sq = tl.load(exp_avg_ptr + flat), tl.load(exp_avg_sq_ptr + flat)
        # The weights are 1 − β: of β in fp32, 1 − 0.999 would be off by 1.3 · 10⁻⁵. In this order β
        # = 0 is exact.
        exp_avg = exp_avg - weight1 * exp_avg + weight1 * grad
        exp_avg_sq = exp_avg_sq - weight2 * exp_avg_sq + weight2 * grad * grad
        # In fp64: in fp32 the first 1 − β₂ᵗ would keep four digits.
        step = tl.load(steps_ptr + number).to(tl.float64)
        correction1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
        correction2 = (1 - tl.exp2(step * log2_beta2)).to(tl.float32)
        theta -= lr * decay * theta
        theta -= lr / correction1 * exp_avg / (tl.sqrt(exp_avg_sq / correction2) + eps)
        tl.store(exp_avg_ptr + flat, exp_avg)
        tl.store(exp_avg_sq_ptr + flat, exp_avg_sq)
        if master_ptr is not None:
            tl.store(master_ptr + flat, theta)
        tl.store(param_ptr + place, theta, mask=inside)


class _Bucket:
    """Parameters of one group, device and dtype, which one launch updates; `views` holds the state
    of each, where it has one that of before. Without a value, a master is its parameter, the rest
    0.
    """

    def __init__(self, group: dict, params: list[Tensor], state: dict[Tensor, dict]):
        self.group = group
        self.dtype = params[0].dtype
        self.seen = []
        device = params[0].device
        sizes = torch.tensor([p.numel() for p in params])
        num_blocks = -(-sizes // BLOCK.value)
        starts = BLOCK.value * (num_blocks.cumsum(0) - num_blocks)
        self.spans = torch.stack((starts, starts + sizes), 1).to(device)
        # Of each program, the number of its parameter.
        numbers = torch.arange(len(params), dtype=torch.int32)
        self.blocks = numbers.repeat_interleave(num_blocks).to(device)
        # Whatever the default dtype is.
        self.steps = torch.zeros(len(params), dtype=torch.float32, device=device)
        names = ["exp_avg", "exp_avg_sq"]
        if self.dtype != torch.float32:
            names.append("master")
        self.flat = {name: self.steps.new_zeros(BLOCK.value * len(self.blocks)) for name in names}
        self.views = {}
        for p, step, start in zip(params, self.steps, starts, strict=True):
            views = {name: x[start : start + p.numel()].view_as(p) for name, x in self.flat.items()}
            views["step"] = step
            before = {"master": p} | state.get(p, {})
            for name in before.keys() & views.keys():
                views[name].copy_(torch.as_tensor(before[name]))
            self.views[p] = state[p] = views

    def check(self) -> None:
        """Raises ValueError where an updated parameter is no longer what its state and the kernel
        were made for.
        """
        for p, state in self.views.items():
            if p.grad is None:
                continue
            kind = (p.dtype, p.grad.dtype, p.device, p.shape, p.is_contiguous())
            accepted = (self.dtype, self.dtype, self.steps.device, state["exp_avg"].shape, True)
            if kind != accepted:
                raise ValueError(
                    f"a parameter has become {kind} (dtype, gradient's dtype, device, shape, is "
                    f"dense); accepted: {accepted}"
                )

    def update(self) -> None:
        grads = [p.grad for p in self.views]
        # Of one element, and of a view like conj().imag, the sign may be kept apart.
        grads = [
            x if x is None or (x.is_contiguous() and not x.is_neg()) else _dense(x) for x in grads
        ]
        addresses = [NO_GRADIENT.value if x is None else x.data_ptr() for x in grads]
        addresses += [p.data_ptr() for p in self.views]
        # Of a parameter that was cut or transposed where it stands.
        seen = addresses + [p.numel() if p.is_contiguous() else None for p in self.views]
        is_captured = self.steps.is_cuda and torch.cuda.is_current_stream_capturing()
        if seen != self.seen or is_captured:
            self.check()
            self.write(addresses)
            self.seen = [] if is_captured else seen
        self.steps += self.is_updated
        beta1, beta2 = self.group["betas"]
        Launcher(adamw_kernel)[(len(self.blocks),)](
            self.flat["exp_avg"],
            self.flat["exp_avg_sq"],
            self.flat.get("master"),
            self.addresses,
            self.blocks,
            self.spans,
            self.steps,
            len(self.views),
            float(self.group["lr"]),
            float(1 - beta1),
            float(1 - beta2),
            # β = 0 has no logarithm; 1 − 10⁻³⁰⁰ is 1.
            math.log2(max(beta1, 1e-300)),
            math.log2(max(beta2, 1e-300)),
            float(self.group["eps"]),
            float(self.group["weight_decay"]),
            DTYPE=LANGUAGE_DTYPES[self.dtype],
        )

    def write(self, addresses: list[int]) -> None:
        """Writes the addresses on the device and, fp32, 1 for each parameter with a gradient, 0 for
        the others.
        """
        # A new tensor each time: a graph's replay must not write into what a called step takes for
        # written.
        self.addresses = self.blocks.new_empty(len(addresses), dtype=torch.int64)
        for first in range(0, len(addresses), ADDRESSES_A_LAUNCH):
            # As arguments of launches, which a graph keeps.
            values = tuple(addresses[first : first + ADDRESSES_A_LAUNCH])
            write_addresses_kernel[(1,)](self.addresses, first, values)
        self.is_updated = (self.addresses[: len(self.views)] != NO_GRADIENT.value).float()

    def update_plainly(self) -> None:
        """Updates the parameters by PyTorch's function."""
        self.check()
        options = {name: self.group[name] for name in ("lr", "eps", "weight_decay")}
        beta1, beta2 = self.group["betas"]
        for p, state in self.views.items():
            if p.grad is None:
                continue
            theta = state.get("master", p)
            theta.copy_(torch.where(theta.to(p.dtype) == p, theta, p))
            adamw(
                [theta],
                [_dense(p.grad).float()],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                beta1=beta1,
                beta2=beta2,
                amsgrad=False,
                maximize=False,
                **options,
            )
            p.copy_(theta)


def _dense(grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise ValueError(f"gradients must be dense, got {grad.layout}")
    return grad.contiguous().resolve_neg()


def _check_form(group: dict) -> None:
    """Raises ValueError for a parameter group of a form of AdamW that the kernel does not have."""
    if group.get("amsgrad") or group.get("maximize"):
        raise ValueError("amsgrad or maximize is set; accepted: neither")


class FusedAdamW(torch.optim.AdamW):
    """AdamW that updates all parameters of a group, device and dtype in one launch; others stay
    without a gradient.

    Args:
        params: parameters or groups of them, dense, of fp32, bf16 or fp16. Those in 16 bits get an
            fp32 master, which starts as their copy and is what trains; the parameter is the master
            rounded. Where it is not, somebody has written it since the last step, and the master
            becomes the parameter.
        lr, betas, eps, weight_decay: as torch.optim.AdamW has them. A CUDA graph keeps the values
            it was captured with, and the state: one that is loaded needs another graph.

    Each parameter's state holds exp_avg, exp_avg_sq and master, fp32 and shaped as it, and step,
    one fp32 number that counts its updates. All are views of tensors that hold the state of many
    parameters: write into them, but do not replace them. A step lays them out anew where somebody
    has written other parameters into `param_groups`; a CUDA graph does not follow. Without a GPU
    PyTorch's own AdamW runs on them.

    Raises:
        ValueError: a parameter that is not dense or of another dtype; a value out of its range;
            amsgrad or maximize in a group, whenever it is set; in a step, a sparse gradient, or a
            parameter that is of another dtype, device or shape than before.

    Error budget: an update is off by at most a few fp32 roundings of itself.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        self.buckets: list[_Bucket] = []
        super().__init__(params, lr, betas, eps, weight_decay)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        self._lay_out(group)
        self.param_groups.append(group)
        self.laid_out = self._identities()

    def _identities(self) -> list[list[int]]:
        """Returns which groups there are, and which parameters they hold."""
        return [[id(group), *map(id, group["params"])] for group in self.param_groups]

    @torch.no_grad()
    def _lay_out(self, group: dict) -> None:
        _check_form(group)
        alike: dict[tuple, list[Tensor]] = {}
        for p in dict.fromkeys(group["params"]):
            if p.dtype not in DTYPES or not p.is_contiguous() or type(p.data) is not Tensor:
                raise ValueError(
                    f"parameters must be dense and of {', '.join(map(str, DTYPES))}; got "
                    f"{p.dtype}, strides {p.stride()}, {type(p.data).__name__}; fully sharded: "
                    f"torch.optim.AdamW(fused=True)"
                )
            alike.setdefault((p.device, p.dtype), []).append(p)
        self.buckets += [_Bucket(group, params, self.state) for params in alike.values()]

    def load_state_dict(self, state_dict: dict) -> None:
        """Copies a state, ours or torch.optim.AdamW's.

        A parameter without a saved state starts anew; a master that is not saved becomes the
        parameter's value.

        Raises ValueError, before anything is copied, for groups of other numbers of parameters or
        with amsgrad or maximize, and a state of other names or shapes.
        """
        for group in state_dict["param_groups"]:
            _check_form(group)
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        # By parameter: by number, PyTorch would round the state to their dtype.
        state = {}
        # Of other numbers of parameters, which PyTorch refuses, the common ones.
        for number, p in zip(numbers, params, strict=False):
            state[p] = state_dict["state"].get(number, {})
            shapes = {name: torch.as_tensor(x).shape for name, x in state[p].items()}
            accepted = {name: x.shape for name, x in self.state[p].items()}
            optional = {"master": p.shape} if "master" in accepted else {}
            if shapes and optional | shapes != accepted:
                raise ValueError(
                    f"the state of parameter {number} is {shapes}; accepted: {accepted}"
                )
        super().load_state_dict({**state_dict, "state": state})

    def __setstate__(self, state: dict) -> None:
        """Lays the state out anew: in a copy, out of a pickle, where one is loaded or groups have
        changed.
        """
        super().__setstate__(state)
        self.buckets = []
        for group in self.param_groups:
            self._lay_out(group)
        self.laid_out = self._identities()

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient; returns what `closure` does, None without
        one.
        """
        loss = torch.enable_grad()(closure)() if closure else None
        # Whoever adds or prunes parameters during training writes into `param_groups`.
        if self._identities() != self.laid_out:
            self.__setstate__({})
        for bucket in self.buckets:
            _check_form(bucket.group)
            if runs_kernel(bucket.steps):
                with torch.cuda.device_of(bucket.steps):
                    bucket.update()
            else:
                bucket.update_plainly()
        return loss
