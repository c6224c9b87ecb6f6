"""An optimizer whose state is spread over the ranks: each keeps and applies the state of its share
of the parameters.

Source: Rajbhandari et al. 2020, ZeRO (stage 1, but whole parameters are dealt out and gradients
stay all-reduced).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from labkit.parallel.collectives import check_ranks_agree


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps like `optimizer_cls(params, **kwargs)`; a rank holds the state of about 1/world size of
    the bytes.

    Every parameter has an owner, the rank with the fewest bytes when the larger parameters are
    dealt out first. A step updates the owned parameters and broadcasts them all. Gradients must be
    averaged before. Learning-rate schedulers act on `param_groups` as ever. `param_groups` holds
    all parameters, `state` only those of this rank.

    Args:
        params: parameters or groups of them, the same on every rank, which are made contiguous; one
            given twice in a group counts once.
        optimizer_cls: class of a torch optimizer that treats each parameter by itself, unlike
            LBFGS, and whose step needs no closure.
        kwargs: passed to it.

    Raises ValueError for an empty parameter list (as every torch optimizer), fully sharded
    parameters, and those that differ between ranks in number, shape or dtype, on every rank alike;
    RuntimeError in a step where `param_groups` were given other parameters.
    """

    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any):
        # One empty group instead of the parameters, for the class's own defaults.
        self._local = optimizer_cls([{"params": []}], **kwargs)
        self._local.param_groups.clear()
        self._owners: dict[Tensor, int] = {}
        self._bytes = [0] * dist.get_world_size()
        super().__init__(params, self._local.defaults)
        self.state = self._local.state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's; its parameters are dealt out on top of what the ranks hold
        already. Collective.
        """
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        if any(hasattr(p, "_local_tensor") for p in group["params"]):
            raise ValueError("parameters are sharded already; accepted: torch's optimizers")
        # Tied parameters may be listed once for each module that uses them.
        group["params"] = list(dict.fromkeys(group["params"]))
        check_ranks_agree([f"a parameter of {tuple(p.shape)}, {p.dtype}" for p in group["params"]])
        for p in sorted(group["params"], key=lambda p: p.nbytes, reverse=True):
            # What is sent is the memory that they lie in.
            p.data = p.detach().contiguous()
            owner = self._bytes.index(min(self._bytes))
            self._owners[p] = owner
            self._bytes[owner] += p.nbytes
        owned = [p for p in group["params"] if self._owners[p] == dist.get_rank()]
        self._local.add_param_group({**group, "params": owned})
        self.param_groups.append(group)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates the owned parameters, then broadcasts each from its owner; returns the closure's
        value.
        """
        if self._owners.keys() != {p for group in self.param_groups for p in group["params"]}:
            raise RuntimeError("param_groups hold other parameters; accepted: by add_param_group")
        loss = torch.enable_grad()(closure)() if closure else None
        _copy_settings(self.param_groups, self._local.param_groups)
        self._local.step(**kwargs)
        # Some optimizers count or adapt in their groups.
        _copy_settings(self._local.param_groups, self.param_groups)
        # Frozen ones too: what has a gradient is updated, and not every rank can know.
        works = [
            dist.broadcast(p.detach(), src=owner, async_op=True)
            for p, owner in self._owners.items()
        ]
        for work in works:
            work.wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks on each of them, on the CPU and as the unsharded optimizer
        names it.

        Collective: every rank calls it. It loads into `optimizer_cls` and into any number of ranks.
        """
        gathered = {}
        for p, owner in self._owners.items():
            own = self._local.state.get(p, {})
            values = [tree_map_only(Tensor, lambda x: x.to("cpu", copy=True), own)]
            dist.broadcast_object_list(values, src=owner)
            if values[0]:
                gathered[p] = values[0]
        self.state = gathered
        try:
            return super().state_dict()
        finally:
            self.state = self._local.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's share out of a full state dict; the world size it was made with does
        not matter.

        Raises ValueError, and loads nothing, where the groups have other numbers of parameters.
        """
        # The last hook: the others are shown the state dict as it is.
        hook = self.register_load_state_dict_pre_hook(ShardedOptimizer._load_share)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self.state = self._local.state

    def _load_share(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Loads this rank's share; returns the state dict with a state by parameter, which torch
        keeps as it is.
        """
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(saved["params"]) for saved in state_dict["param_groups"]]
        if saved_sizes != sizes:  # torch would find it after the share is loaded
            raise ValueError(f"groups of {saved_sizes} parameters; accepted: of {sizes}")
        groups = []
        known = state_dict["state"]
        state = {}
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            pairs = zip(saved["params"], group["params"], strict=True)
            numbers = [number for number, p in pairs if self._owners[p] == dist.get_rank()]
            groups.append({**saved, "params": numbers})
            state |= {number: known[number] for number in numbers if number in known}
        self._local.load_state_dict({"state": state, "param_groups": groups})
        return {**state_dict, "state": self._local.state}


def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for group, other in zip(source, target, strict=True):
        other.update({name: value for name, value in group.items() if name != "params"})
