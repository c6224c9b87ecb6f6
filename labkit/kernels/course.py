"""The operations as a course has its students write them, from plain operators: what published
times were taken of.

Each reads and writes whole tensors several times; the results are those of PyTorch's own
operations. The exercise: Stanford CS336, assignment 1.
"""

import math

import torch
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    """Returns exp(x − max) / Σ exp(x − max) along the last dimension."""
    exponentials = torch.exp(x - x.max(-1, keepdim=True).values)
    return exponentials / exponentials.sum(-1, keepdim=True)


def attention(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, *, causal: bool = False) -> Tensor:
    """Returns softmax(q kᵀ / √D) v, shaped as q, the scores materialised.

    Args:
        q_BHQD, k_BHKD, v_BHKD: (..., length, D), one floating dtype.
        causal: query i sees keys up to i + (K − Q); each must see one.
    """
    return softmax(_scores(q_BHQD, k_BHKD, causal)) @ v_BHKD


def _scores(q_BHQD: Tensor, k_BHKD: Tensor, causal: bool) -> Tensor:
    """Returns q kᵀ / √D, (..., Q, K), −∞ where a causal mask hides a key."""
    scores_BHQK = q_BHQD @ k_BHKD.transpose(-2, -1) / math.sqrt(q_BHQD.shape[-1])
    if not causal:
        return scores_BHQK
    num_queries, num_keys = scores_BHQK.shape[-2:]
    is_visible_QK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHQD.device)
    return torch.where(is_visible_QK.tril(num_keys - num_queries), scores_BHQK, -math.inf)


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients by q, k and v, the scores computed again from what a forward kernel
    keeps.

    Args:
        q, k, v, out, grad_out: (..., length, D); lse: (..., length), log Σ exp of the scores, fp32.
    """
    weights = torch.exp(_scores(q, k, causal) - lse[..., None]).to(q.dtype)
    row_sums = (out * grad_out).sum(-1, keepdim=True)
    grad_scores = weights * (grad_out @ v.mT - row_sums) / math.sqrt(q.shape[-1])
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad_out


def silu(x: Tensor) -> Tensor:
    """Returns x · sigmoid(x)."""
    return x * torch.sigmoid(x)


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the mean of log Σ exp(logits) − logits[target], a scalar in nats; the largest logit
    is taken off first.

    Args:
        logits_BTV: floating; targets_BT: int64.
    """
    shifted_BTV = logits_BTV - logits_BTV.max(-1, keepdim=True).values
    chosen_BT = shifted_BTV.gather(-1, targets_BT.unsqueeze(-1)).squeeze(-1)
    return (torch.log(torch.exp(shifted_BTV).sum(-1)) - chosen_BT).mean()


class AdamW(torch.optim.Optimizer):
    """AdamW as a loop over the parameters, about a dozen operators for each.

    Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2; defaults
    are PyTorch's.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state["step"] = state.get("step", 0) + 1
                m = state["exp_avg"] = beta1 * state.get("exp_avg", 0) + (1 - beta1) * p.grad
                v = state["exp_avg_sq"] = (
                    beta2 * state.get("exp_avg_sq", 0) + (1 - beta2) * p.grad**2
                )
                p -= lr * group["weight_decay"] * p
                p -= lr * (m / (1 - beta1**t)) / (torch.sqrt(v / (1 - beta2**t)) + group["eps"])
