"""The chunked loss against torch's own and against numbers by hand."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.model.loss import CHUNK, label_smoothed_loss

ROWS = CHUNK["cpu"]


def case(rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, dtype=dtype, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, 40, (rows,), generator=generator)


def test_the_smoothed_target_is_that_of_the_formula():
    # Scores 0 and ln 3 give p = (1/4, 3/4); with e = .1 and V = 2 the target of class 1 is q = (.05, .95).
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)]])
    loss, nll = label_smoothed_loss(hidden, weight, torch.tensor([1]), 0.1)
    assert loss.item() == pytest.approx(-(0.05 * math.log(1 / 4) + 0.95 * math.log(3 / 4)))
    assert nll.item() == pytest.approx(-math.log(3 / 4))


@pytest.mark.filterwarnings("error")  # torch warns when a buffer has to be resized
@pytest.mark.parametrize("rows", [1, 7, ROWS, ROWS + 1, 2 * ROWS + 31])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_value_and_gradients_equal_those_of_torch(rows, smoothing):
    hidden, weight, target = case(rows)
    loss, nll = label_smoothed_loss(hidden, weight, target, smoothing)
    (3 * loss).backward()
    ours = loss.detach(), hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    scores = hidden @ weight.T
    expected = F.cross_entropy(scores, target, label_smoothing=smoothing, reduction="sum")
    (3 * expected).backward()
    assert torch.allclose(ours[0], expected)
    assert torch.allclose(ours[1], hidden.grad)
    assert torch.allclose(ours[2], weight.grad)
    assert torch.allclose(nll, F.cross_entropy(scores, target, reduction="sum"))
    assert not nll.requires_grad


def test_gradients_pass_the_numerical_check():
    hidden, weight, target = case(5)
    assert torch.autograd.gradcheck(lambda h, w: label_smoothed_loss(h, w, target, 0.1)[0], (hidden, weight))


def test_half_precision_products_keep_a_float32_loss():
    hidden, weight, target = case(300, torch.float32)
    exact, _ = label_smoothed_loss(hidden, weight, target, 0.1)
    exact.backward()
    grads = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, nll = label_smoothed_loss(hidden, weight, target, 0.1)
    loss.backward()
    assert (loss.dtype, nll.dtype) == (torch.float32, torch.float32)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    scores = (hidden.bfloat16() @ weight.bfloat16().T).float()
    assert loss.item() == pytest.approx(F.cross_entropy(scores, target, label_smoothing=0.1, reduction="sum").item())
    assert nll.item() == pytest.approx(F.cross_entropy(scores, target, reduction="sum").item())
    for ours, theirs in zip((hidden.grad, weight.grad), grads, strict=True):
        assert ours.dtype == torch.float32
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.999


def test_a_word_that_is_never_likely_gets_the_even_part_of_the_gradient_in_float32():
    hidden, weight, target = case(300, torch.float32)
    hidden, weight = hidden.detach().abs().requires_grad_(), weight.detach()
    weight[39] = -100  # of probability 0 after hidden values above 0
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = label_smoothed_loss(hidden, weight, target.clamp(max=38), 0.1)
    loss.backward()
    # (p - q) summed over the tokens, with p = 0 and q = 0.1 / V
    expected = -0.1 / 40 * hidden.detach().bfloat16().double().sum(0)
    assert weight.grad[39].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_the_scores_of_all_tokens_never_exist_at_once():
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.extend(
                one.numel() for one in (made if isinstance(made, tuple | list) else [made]) if torch.is_tensor(one)
            )
            return made

    hidden, weight, target = case(5 * ROWS)
    with Sizes():
        loss, _ = label_smoothed_loss(hidden, weight, target, 0.1)
        loss.backward()
    assert max(sizes) == max(ROWS * len(weight), hidden.numel())


@pytest.mark.parametrize("factor", [1 / 100_000, 2.0**18])
def test_neither_many_tokens_nor_a_loss_scale_are_beyond_a_float16_gradient(factor):
    grads = []
    for dtype in (torch.float32, torch.float16):
        hidden, weight, target = case(30, torch.float32)
        with torch.autocast("cpu", dtype=torch.float16, enabled=dtype == torch.float16):
            loss, _ = label_smoothed_loss(hidden, weight, target, 0.1)
        (loss * factor).backward()
        grads.append(hidden.grad)
    assert torch.allclose(grads[1], grads[0], rtol=1e-2, atol=3e-3 * float(grads[0].abs().max()))


def test_a_loss_without_a_gradient_is_the_same_for_a_third_of_the_products(monkeypatch):
    hidden, weight, target = case(ROWS + 9)
    with_gradient = [value.item() for value in label_smoothed_loss(hidden, weight, target, 0.1)]
    monkeypatch.setattr(torch, "addmm", None)
    with torch.no_grad():
        assert [value.item() for value in label_smoothed_loss(hidden * 1, weight, target, 0.1)] == with_gradient
