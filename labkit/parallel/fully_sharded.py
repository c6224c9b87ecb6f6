"""Fully sharded data parallel training: every rank holds 1/world size of each matrix, its gradient and optimizer state.

A layer's full weight exists only from a little before its use until just after it, in forward and again in backward.
The order in which layers were used in one iteration says in the next one which gather to start ahead: layer i's when
layer i−2 has finished and layer i−1 is about to run. Ranks must run the same layers in the same order.

Sources: Rajbhandari et al. 2020, ZeRO stage 3; Zhao et al. 2023, PyTorch FSDP; Stanford CS336 assignment 2.
"""

import functools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from labkit.parallel.collectives import CopyWork, PeerCopy, PeerMemory, all_gather, reduce_scatter, start
from labkit.parallel.data_parallel import MB, GradientBuckets, check_and_broadcast, check_transport, weakly
from labkit.parallel.launch import moment

NUM_REDUCING = 2
"""Layers whose full gradients may be on their way at once. With one more, backward waits for the oldest."""


class _Weight:
    """One matrix: this rank's shard, flat and padded to the same length everywhere, and the full one, mostly empty."""

    def __init__(self, name: str, parameter: nn.Parameter, compute_dtype: torch.dtype | None):
        self.name, self.shape, self.num_elements = name, parameter.shape, parameter.numel()
        world_size, rank = dist.get_world_size(), dist.get_rank()
        chunk = -(-self.num_elements // world_size)
        self.padding = chunk * world_size - self.num_elements
        padded = F.pad(parameter.detach().reshape(-1), (0, self.padding))
        self.shard = nn.Parameter(padded.chunk(world_size)[rank].clone(), requires_grad=parameter.requires_grad)
        self.flat = torch.empty_like(padded, dtype=compute_dtype or parameter.dtype)
        self.own = self.flat.chunk(world_size)[rank]
        # `.data`: another version counter, so that refilling the memory is no change of what autograd has saved.
        full = self.flat[: self.num_elements].view(self.shape).data
        self.full = nn.Parameter(full, requires_grad=parameter.requires_grad)
        self.layer: _Layer | None = None
        self.works: list[Any] = []
        self.sources: list[Tensor] = []  # each rank's shard, where they are copied
        self.is_gathered = True
        self.free()

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def free(self) -> None:
        """Gives the memory back; its next user on the current stream comes after this weight's last one."""
        if self.is_gathered:
            self.wait()
            self.flat.untyped_storage().resize_(0)
            self.is_gathered = False


class _PeerShards(PeerMemory):
    """The shards of all ranks in symmetric memory, from which each copies what it lacks.

    Copy engines move the data while the multiprocessors compute. A barrier before and after `refresh` keeps a shard
    as it is while another rank reads it.
    """

    def __init__(self, weights: Sequence[_Weight]):
        sizes, (dtype,) = [weight.shard.numel() for weight in weights], {weight.flat.dtype for weight in weights}
        super().__init__(sum(sizes), dtype)
        self.stream = torch.cuda.Stream()
        for weight, *sources in zip(weights, *(buffer.split(sizes) for buffer in self.buffers), strict=True):
            weight.sources = sources
        self.shards, self.copies = [w.shard for w in weights], [w.sources[self.rank] for w in weights]

    @torch.no_grad()
    def refresh(self) -> None:
        """Publishes this rank's shards as they are now."""
        self.memory.barrier()
        torch._foreach_copy_(self.copies, self.shards)
        self.memory.barrier()

    def copy(self, weights: Sequence[_Weight]) -> None:
        """Fills the weights from all ranks' shards."""
        for weight in weights:
            for target, source in zip(weight.flat.chunk(len(weight.sources)), weight.sources, strict=True):
                target.copy_(source)


class _Layer:
    """What is gathered together: a module's own weight, or all weights inside a compiled module or a unit."""

    def __init__(self, name: str, owners: list[tuple[nn.Module, _Weight]]):
        self.name, self.owners, self.peers = name, owners, None
        self.weights = list(dict.fromkeys(weight for _, weight in owners))
        self.masters: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.arrived: list[_Weight] = []  # those with a gradient to be sent
        # The gradient of a lookup does not read the table.
        self.backward_reads = not all(isinstance(owner, nn.Embedding) for owner, _ in owners)
        for weight in self.weights:
            weight.layer = self

    @torch.no_grad()
    def start_gather(self) -> None:
        """Sends for all of the weights that are not here in one operation; `_Weight.wait` waits for it."""
        missing = [weight for weight in self.weights if not weight.is_gathered]
        if not missing:
            return
        for weight in missing:
            weight.flat.untyped_storage().resize_(weight.flat.nbytes)
            weight.is_gathered = True
        if self.peers is not None:
            works = [CopyWork(self.peers.stream, self.peers.copy, missing)]
        else:
            for weight in missing:
                weight.own.copy_(weight.shard)
            works = start(all_gather, [(weight.flat, weight.own) for weight in missing])
        for weight in missing:
            weight.works = works


class FullyShardedDataParallel(nn.Module):
    """Trains `module` with each floating parameter named `weight` of two and more dimensions sharded over the ranks.

    `parameters()` are the flat shards (padded with zeros to equal length, so a rank may hold padding alone) and, whole,
    everything else, with rank 0's values. Make the optimizer afterwards. `grad` has its parameter's shape and dtype.
    Compile blocks before wrapping them: the weights inside a compiled module are gathered together, outside of it.
    To accumulate, call `finish_gradient_synchronization()` after each backward.

    Args:
        module: on this rank's device, the same on every rank but for the values.
        compute_dtype: a floating dtype that weights are cast to before they are gathered and in which gradients are
            reduced; layers with such a weight cast their inputs and biases to it. None leaves everything as it is.
            Layers without one compute in what they are given, torch's own norms in their parameters' dtype.
        units: classes of modules, blocks for example, whose weights are gathered together: fewer and larger transfers,
            more memory. What is inside a unit or a compiled module is otherwise a layer by itself.
        transport: "collective", or "copy": copy engines gather weights from the peers' symmetric memory, which holds
            every shard once more in the dtype that is gathered, and bring a gradient's pieces to the ranks that add
            them, through memory as large as the largest layer. NCCL's GPUs and weights of one dtype only.

    Attributes:
        waits: None, or a list that collects (layer, begin, end) of each wait for a gather: CUDA events, or seconds.

    Raises ValueError for another compute_dtype or transport and as `check_and_broadcast`.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        units: tuple[type[nn.Module], ...] = (),
        transport: str = "collective",
    ):
        super().__init__()
        check_transport(transport)
        is_floating = isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
        if compute_dtype is not None and not is_floating:
            raise ValueError(f"compute_dtype is {compute_dtype}; accepted: None or a floating dtype")
        check_and_broadcast(module)
        self.module, self.compute_dtype, self._units = module, compute_dtype, units
        self.waits: list[tuple[str, Any, Any]] | None = None
        self._average = dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
        self._plan: list[_Layer] = []
        self._uses: list[_Layer] = []
        self._position, self._in_backward = 0, False
        self._frozen: list[_Weight] = []
        self._reducing: deque[tuple[list[_Weight], list[Tensor], list[Tensor], list[Any]]] = deque()
        self._weights: dict[nn.Parameter, _Weight] = {}
        by_parameter: dict[nn.Parameter, _Weight] = {}
        owners: dict[nn.Module, _Weight] = {}
        for name, owner in module.named_modules():
            parameter = owner._parameters.get("weight")
            if parameter is not None and parameter.ndim >= 2 and parameter.is_floating_point():
                if parameter not in by_parameter:
                    weight = by_parameter[parameter] = _Weight(f"{name}.weight", parameter, compute_dtype)
                    self._weights[weight.shard] = weight
                    if parameter.requires_grad:
                        hook, of = weakly(self._arrived), weakref.ref(weight)
                        weight.full.register_post_accumulate_grad_hook(lambda _, hook=hook, of=of: hook(of()))
                owners[owner] = by_parameter[parameter]
                owner._parameters["weight"] = owners[owner].shard
            elif compute_dtype is not None and isinstance(owner, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
                owner.register_forward_pre_hook(self._cast_to_parameters)
        weights = list(self._weights.values())
        self._peers = _PeerShards(weights) if transport == "copy" else None
        self._staging: PeerCopy | None = None
        self._hook(module, "", owners)
        if transport == "copy":
            most = max(sum(w.flat.numel() for w in weight.layer.weights) for weight in weights)
            self._staging = PeerCopy(most, weights[0].flat.dtype)
            self._reducing_stream = torch.cuda.Stream()
        self._replicated = GradientBuckets(
            [p for p in module.parameters() if p not in self._weights], bucket_bytes=25 * MB, overlap=True
        )

    def _hook(self, module: nn.Module, name: str, owners: dict[nn.Module, _Weight]) -> None:
        compiled = module._compiled_call_impl
        if compiled is not None or hasattr(module, "_orig_mod") or isinstance(module, self._units):
            inside = [(owner, owners[owner]) for owner in module.modules() if owner in owners]
        else:
            inside = [(module, owners[module])] if module in owners else []
            for child_name, child in module.named_children():
                self._hook(child, f"{name}.{child_name}".lstrip("."), owners)
        if not inside:
            return
        layer = _Layer(name, inside)
        layer.peers = self._peers

        before, after = (functools.partial(f, layer) for f in (self._before_forward, self._after_forward))

        def around(*args, **kwargs):
            args, kwargs = before(module, args, kwargs)
            output = None
            try:
                output = compiled(*args, **kwargs)
            finally:
                after(module, args, output)
            return output

        if compiled is not None:
            module._compiled_call_impl = around
        else:
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after, always_call=True)

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of symmetric memory that copies are read from; torch's allocator does not count them."""
        return self._peers.buffer.nbytes + self._staging.buffer.nbytes if self._peers else 0

    def forward(self, *args, **kwargs):
        """Returns what `module` returns."""
        # A forward pass alone, for validation, follows the same plan and leaves it as it is.
        if self._uses != self._plan[: len(self._uses)]:
            self._plan = self._uses
        self._uses, self._position, self._in_backward = [], 0, False
        if self._peers is not None:
            self._peers.refresh()
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._free_all()
        return output

    def finish_gradient_synchronization(self) -> None:
        """To call after backward and before the optimizer: from then on every `grad` is the ranks' average."""
        for weight in self._weights.values():
            if weight.layer.arrived:  # others of its layer were not used
                self._reduce(weight.layer)
        while self._reducing:
            self._finish_oldest()
        self._replicated.finish()
        self._free_all()

    def gather_full_params(self) -> dict[str, Tensor]:
        """Returns a copy of every parameter, whole and in the master dtype, by its name in `module`. Collective."""
        full = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            full[name] = parameter.detach().clone()
            if weight := self._weights.get(parameter):
                flat = torch.empty_like(weight.flat, dtype=parameter.dtype)
                all_gather(flat, full[name])
                full[name] = flat[: weight.num_elements].view(weight.shape)
        return full

    def _use(self, layer: _Layer) -> None:
        """Makes the layer's weights whole, and starts to gather those that came next in the iteration before."""
        layer.start_gather()
        self._uses.append(layer)
        following = self._plan[self._position : self._position + 2]
        self._position = self._position + 1 if following[:1] == [layer] else len(self._plan)
        if len(following) == 2 and following[0] is layer:
            following[1].start_gather()
        begin = moment() if self.waits is not None else None
        for weight in layer.weights:
            weight.wait()
        if begin is not None:
            self.waits.append((layer.name, begin, moment()))

    def _before_forward(self, layer: _Layer, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._use(layer)
        for owner, weight in layer.owners:
            owner._parameters["weight"] = weight.full
            if self.compute_dtype is not None:
                for name, parameter in owner._parameters.items():
                    if name != "weight" and parameter is not None and parameter.is_floating_point():
                        owner._parameters[name] = parameter.to(self.compute_dtype)
                        layer.masters.append((owner, name, parameter))
        return _cast((args, kwargs), self.compute_dtype) if self.compute_dtype is not None else (args, kwargs)

    def _after_forward(self, layer: _Layer, _: nn.Module, args: tuple, output: Any) -> None:
        for owner, weight in layer.owners:
            owner._parameters["weight"] = weight.shard
        while layer.masters:
            owner, name, parameter = layer.masters.pop()
            owner._parameters[name] = parameter
        # Recomputed in backward: its own backward comes next and frees it. Used again at once: the same.
        if not self._in_backward and self._plan[self._position : self._position + 1] != [layer]:
            for weight in layer.weights:
                weight.free()
        if layer.backward_reads:
            differentiable = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
            if len(differentiable) == 1:
                differentiable[0].register_hook(lambda _: self._before_backward(layer))
            elif differentiable:
                hook = torch.autograd.graph.register_multi_grad_hook
                hook(differentiable, lambda _: self._before_backward(layer), mode="any")

    def _before_backward(self, layer: _Layer) -> None:
        self._in_backward = True
        # A frozen weight has no gradient whose arrival would say that it is done: the next layer's turn does.
        for weight in self._frozen:
            if weight not in layer.weights:
                weight.free()
        self._frozen = [weight for weight in layer.weights if not weight.full.requires_grad]
        self._use(layer)

    def _arrived(self, weight: _Weight) -> None:
        """Frees a weight that has its gradient; sends the layer's gradients once all of them are there."""
        weight.free()
        layer = weight.layer
        layer.arrived.append(weight)
        if len(layer.arrived) == sum(w.layer is layer and w.full.requires_grad for w in layer.weights):
            self._reduce(layer)

    def _reduce(self, layer: _Layer) -> None:
        weights, layer.arrived = layer.arrived, []
        shards, gradients = [], []
        for weight in weights:
            gradient, weight.full.grad = weight.full.grad.reshape(-1), None
            gradients.append(F.pad(gradient, (0, weight.padding)) if weight.padding else gradient)
            shards.append(torch.empty_like(weight.shard, dtype=gradient.dtype))
        if self._staging is not None:
            works = [CopyWork(self._reducing_stream, self._staging.average_scatter, shards, gradients)]
        else:
            works = start(reduce_scatter, list(zip(shards, gradients, strict=True)), self._average)
        self._reducing.append((weights, shards, gradients, works))
        if len(self._reducing) > NUM_REDUCING:
            self._finish_oldest()

    @torch.no_grad()
    def _finish_oldest(self) -> None:
        weights, shards, _, works = self._reducing.popleft()
        for work in works:
            work.wait()
        for weight, shard in zip(weights, shards, strict=True):
            gradient = shard.to(weight.shard.dtype)
            if self._average == dist.ReduceOp.SUM:
                gradient.div_(dist.get_world_size())
            weight.shard.grad = gradient if weight.shard.grad is None else weight.shard.grad + gradient

    def _free_all(self) -> None:
        self._frozen = []
        for weight in self._weights.values():
            weight.free()

    @staticmethod
    def _cast_to_parameters(module: nn.Module, args: tuple) -> tuple:
        return _cast(args, module.weight.dtype) if module.weight is not None else args


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values)
