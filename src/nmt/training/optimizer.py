"""Adam and the courses of the learning rate."""

import math

import torch
from torch import nn

from nmt.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig, max_steps: int, d_model: int) -> float:
    """The learning rate of update number `step` (from 1) of `max_steps`.

    noam: d_model^-0.5 min(step^-0.5, step warmup^-1.5) (Vaswani et al. 2017, equation 3). The others rise in a
    straight line to `learning_rate` and then fall with the root of the step, along half a cosine to 0, or not at all.
    """
    warm = min(1.0, step / optim.warmup_steps)
    if optim.schedule == "noam":
        rate = min(1 / math.sqrt(step), step * math.pow(optim.warmup_steps, -1.5)) / math.sqrt(d_model)
    elif optim.schedule == "inverse_sqrt":
        rate = optim.learning_rate * min(warm, math.sqrt(optim.warmup_steps / step))
    elif optim.schedule == "cosine":
        rest = max(1, max_steps - optim.warmup_steps)
        done = min(1.0, max(0, step - optim.warmup_steps) / rest)
        rate = optim.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * done))
    else:
        rate = optim.learning_rate * warm
    return rate * optim.lr_factor


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """Adam as in the paper's section 5.3, fused; AdamW decays matrices, but neither norms nor biases."""
    kind = torch.optim.Adam if optim.optimizer == "adam" else torch.optim.AdamW
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return kind(groups, lr=0.0, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Make every group of parameters use `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate
