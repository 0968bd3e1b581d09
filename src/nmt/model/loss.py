"""Label-smoothed cross-entropy that never holds the scores of all tokens at once.

Shapes: N real target tokens, D model width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = {"cpu": 256, "cuda": 4096}
"""Rows of scores that exist at a time: 128 to 512 are equally fast on a CPU; a GPU wants large products."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Output projection, softmax and loss in chunks, the gradients made on the way forward.

    Of N x V scores only a chunk of rows exists. The gradient of the sum with respect to the scores is softmax - q,
    where q is the smoothed target distribution.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, smoothing: float) -> Any:
        vocabulary = len(weight_VD)
        dtype = (
            torch.get_autocast_dtype(hidden_ND.device.type)
            if torch.is_autocast_enabled(hidden_ND.device.type)
            else hidden_ND.dtype
        )
        with torch.autocast(hidden_ND.device.type, enabled=False):
            hidden, weight = hidden_ND.to(dtype), weight_VD.to(dtype)
            grad_hidden_ND = torch.empty_like(hidden)
            grad_weight_VD = torch.zeros_like(weight_VD)
            # float64 stays float64 for tests; half precision gets float32 scores.
            exact = torch.promote_types(dtype, torch.float32)
            loss, nll = hidden.new_zeros((), dtype=exact), hidden.new_zeros((), dtype=exact)
            chunk = CHUNK.get(hidden.device.type, CHUNK["cpu"])
            buffer_CV = hidden.new_empty(min(chunk, len(hidden)), vocabulary)
            logp_CV = torch.empty_like(buffer_CV, dtype=exact)
            # What smoothing adds is the same for each score, so it is added to the products and not to all scores.
            even, sum_D = smoothing / vocabulary, weight.sum(0, dtype=exact)
            for start in range(0, len(hidden), chunk):
                hidden_CD, target_C1 = hidden[start : start + chunk], target_N[start : start + chunk, None]
                score_CV = torch.mm(hidden_CD, weight.t(), out=buffer_CV[: len(hidden_CD)]).to(exact)
                grad_CV = torch.log_softmax(score_CV, 1, out=logp_CV[: len(hidden_CD)])
                nll_C1 = -grad_CV.gather(1, target_C1)
                nll += nll_C1.sum()
                # -sum_v q_v log p_v with q = (1-e) onehot + e/V; log p_v = score_v - lse, and lse = score_target + nll
                lse_C1 = score_CV.gather(1, target_C1) + nll_C1
                loss += (1 - smoothing) * nll_C1.sum() + smoothing * lse_C1.sum()
                loss -= even * (hidden_CD.to(exact) @ sum_D).sum()
                if not ctx.needs_input_grad[0]:  # A dev set: two of the three products are for the gradient.
                    continue
                # softmax - q, but for the even part of q
                grad_CV.exp_().scatter_add_(1, target_C1, torch.full_like(nll_C1, smoothing - 1))
                grad_CV = grad_CV.to(dtype)
                torch.addmm(-even * sum_D.to(dtype), grad_CV, weight, out=grad_hidden_ND[start : start + chunk])
                if dtype == weight_VD.dtype:
                    grad_weight_VD.addmm_(grad_CV.t(), hidden_CD)
                else:
                    grad_weight_VD += grad_CV.t() @ hidden_CD
            grad_weight_VD -= even * hidden.sum(0, dtype=weight_VD.dtype)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.hidden_dtype = hidden_ND.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # Not the other way round: float16 has no numbers for a gradient over 25,000 tokens, or times the loss scale.
        return grad_hidden_ND.to(ctx.hidden_dtype) * grad, grad_weight_VD * grad, None, None


def label_smoothed_loss(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and negative log-likelihood in nats, both summed over the N target tokens.

    The target distribution is (1-smoothing) onehot + smoothing/V (Szegedy et al. 2016, section 7). Only the
    cross-entropy has a gradient. Logits are float32 whatever the precision of the matrix product.
    """
    loss, nll = _LinearCrossEntropy.apply(hidden_ND, weight_VD, target_N, smoothing)  # type: ignore[no-untyped-call]
    return loss, nll
