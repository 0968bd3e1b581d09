"""Schedules against the closed formulas, Adam against its own."""

import math

import pytest
import torch
from torch import nn

from nmt.config import OptimConfig
from nmt.training.optimizer import build_optimizer, learning_rate, set_learning_rate


@pytest.mark.parametrize(("d_model", "peak"), [(512, 6.99e-4), (1024, 4.94e-4)])
def test_noam_peaks_at_the_end_of_warmup_as_in_the_paper(d_model, peak):
    optim = OptimConfig()
    rates = [learning_rate(step, optim, 100_000, d_model) for step in range(1, 20_001)]
    assert max(rates) == rates[3999] == pytest.approx(peak, rel=1e-3)
    assert rates[0] == pytest.approx(peak / 4000, rel=1e-3)
    assert rates[15_999] == pytest.approx(peak / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("inverse_sqrt", {50: 0.5, 100: 1.0, 400: 0.5, 1000: math.sqrt(0.1)}),
        ("cosine", {50: 0.5, 100: 1.0, 550: 0.5, 1000: 0.0}),
        ("constant", {50: 0.5, 100: 1.0, 1000: 1.0}),
    ],
)
def test_the_other_schedules_follow_their_formulas(schedule, expected):
    optim = OptimConfig(schedule=schedule, learning_rate=2.0, lr_factor=0.5, warmup_steps=100)
    for step, factor in expected.items():
        assert learning_rate(step, optim, 1000, 512) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize("after", [0, 1, 2, 900])
def test_the_cosine_begins_at_its_peak_and_ends_at_zero_however_few_steps_follow_the_warmup(after):
    optim = OptimConfig(schedule="cosine", learning_rate=1.0, warmup_steps=100)
    assert learning_rate(100, optim, 100 + after, 512) == 1.0
    for step in (100 + max(after, 1), 100 + after + 700):
        assert learning_rate(step, optim, 100 + after, 512) == pytest.approx(0.0, abs=1e-12)
    if after == 2:
        assert learning_rate(101, optim, 100 + after, 512) == pytest.approx(0.5)


def test_adam_takes_the_step_of_its_formula():
    model = nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(model, OptimConfig())
    mean = square = torch.zeros(1, 2)
    expected = model.weight.detach().clone()
    for step in range(1, 4):
        set_learning_rate(optimizer, 0.1)
        gradient = torch.tensor([[1.0, -2.0]]) * step
        model.weight.grad = gradient.clone()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        expected -= 0.1 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.98**step)).sqrt() + 1e-9)
        assert torch.allclose(model.weight, expected, atol=1e-6)


def test_eps_halves_the_step_of_a_gradient_of_its_size():
    model = nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer(model, OptimConfig(eps=1e-3))
    set_learning_rate(optimizer, 0.1)
    before = model.weight.item()
    model.weight.grad = torch.full((1, 1), 1e-3)
    optimizer.step()  # the first: g / (sqrt(g^2) + eps)
    assert before - model.weight.item() == pytest.approx(0.05, rel=1e-3)


def test_every_parameter_moves_but_none_before_a_learning_rate_is_set():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))  # of no dimension
    optimizer = build_optimizer(model, OptimConfig())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.allclose(old - new, torch.tensor(0.1))


def test_weight_decay_takes_matrices_but_neither_norms_nor_biases():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = build_optimizer(model, OptimConfig(optimizer="adamw", weight_decay=0.5))
    set_learning_rate(optimizer, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model[0].weight, torch.tensor(0.95))
    for parameter in (model[0].bias, *model[1].parameters()):
        assert torch.equal(parameter, torch.ones(3))
