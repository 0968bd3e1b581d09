"""What one update measures and the loss of the dev set, against sums worked out another way."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nmt.data import batching
from nmt.data.batching import collate
from nmt.data.dataset import Column, ParallelDataset, open_dataset
from nmt.distributed.world import World
from nmt.model.flops import training_flops
from nmt.special_tokens import PAD
from nmt.training import memory, step
from nmt.training.memory import probe_memory, worst_case_batch
from nmt.training.optimizer import learning_rate
from nmt.training.step import OutOfMemory, Trainer, derive_seed, dev_loss, oom_context, prepare, train_step
from tiny import ALONE, as_on_a_gpu, settings


@pytest.fixture(scope="module")
def data(paths) -> ParallelDataset:
    return open_dataset(paths.encode, "train", "en", "zh")


def build(*changes: str, world: World = ALONE) -> Trainer:
    return Trainer.build(settings(*changes), world, (340, 340))


def of_lengths(src: list[int], tgt: list[int]) -> ParallelDataset:
    """Pairs of these lengths, all of one word; the n-th comes from line 10 n."""
    sides = [Column(np.full(sum(n), 9, np.uint16), np.concatenate([[0], np.cumsum(n)])) for n in (src, tgt)]
    return ParallelDataset(*sides, 10 * np.arange(len(src)))


def plain_losses(trainer: Trainer, data: ParallelDataset, pairs: np.ndarray) -> tuple[float, float]:
    """Loss and nll of these pairs in one batch, summed, by torch's own cross-entropy."""
    batch = collate(*data.take(pairs))
    with torch.no_grad():
        scores_NV = trainer.model.logits(trainer.model(batch.src, batch.tgt_in)).flatten(0, 1)
    found = [
        F.cross_entropy(
            scores_NV, batch.tgt_out.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing
        )
        for smoothing in (trainer.config.train.label_smoothing, 0.0)
    ]
    return found[0].item(), found[1].item()


# ── an update ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_an_update_measured_are_the_sums_over_its_pairs(data):
    trainer = build("model.dropout=0", "train.label_smoothing=0.2")
    update = np.arange(5, 45)
    parts = step.micro_batches(trainer, data, update)
    assert len(parts) > 3
    loss, nll = plain_losses(trainer, data, update)
    stats = train_step(trainer, prepare(trainer, data, update), 3)
    src, tgt = data.src.lengths[update], data.tgt.lengths[update]
    assert stats.loss.item() == pytest.approx(loss, rel=1e-5)
    assert stats.nll.item() == pytest.approx(nll, rel=1e-5)
    assert (stats.loss.dtype, stats.nll.dtype) == (torch.float64, torch.float64)
    assert (stats.tgt_tokens, stats.tokens) == (tgt.sum(), src.sum() + tgt.sum())
    assert stats.rate == learning_rate(3, trainer.config.optim, trainer.config.train.max_steps, 16)
    each = [training_flops(trainer.config.model, 340, int(s), int(t)) for s, t in zip(src, tgt, strict=True)]
    assert stats.flops == pytest.approx(sum(each))
    slots = sum(len(p) * int(lengths[p].max()) for p in parts for lengths in (data.src.lengths, data.tgt.lengths))
    assert stats.padding == pytest.approx(1 - stats.tokens / slots)
    assert stats.skipped.item() == 0
    assert set(stats.seconds) == {"data", "forward", "backward", "optimizer"}
    assert all(0 < seconds < 60 for seconds in stats.seconds.values())


def test_the_seconds_of_an_update_are_those_of_its_parts(data, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(step.time, "perf_counter", lambda: float(next(clock)))
    trainer = build("runtime.device_tokens=5000")
    update = prepare(trainer, data, np.arange(9))
    assert len(update.micro_batches) == 1
    begin = next(clock)
    stats = train_step(trainer, update, 1)
    assert stats.seconds == dict.fromkeys(("data", "forward", "backward", "optimizer"), 1.0)
    assert next(clock) - begin == 1 + 4 + 1, "no part is left out and none counted twice"


def test_an_update_begins_with_no_gradient_of_the_one_before(data):
    changes = ("model.dropout=0", "optim.clip_norm=0", "optim.lr_factor=1e-12")
    one, two = build(*changes), build(*changes)
    train_step(two, prepare(two, data, np.arange(50, 90)), 1)
    norms = [train_step(trainer, prepare(trainer, data, np.arange(20)), 2).grad_norm.item() for trainer in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_an_update_moves_each_weight_by_its_learning_rate_at_most(data):
    trainer = build()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    rate = train_step(trainer, prepare(trainer, data, np.arange(30)), 1).rate
    moved = [(p - old).abs().max().item() for p, old in zip(trainer.model.parameters(), before, strict=True)]
    assert max(moved) == pytest.approx(rate, rel=1e-2), "the first step of Adam is the sign of the gradient"


def test_a_gradient_is_clipped_to_its_norm_and_zero_clips_nothing(data):
    norms = {}
    for clip in ("0", "0.01"):
        trainer = build("model.dropout=0", f"optim.clip_norm={clip}")
        before = train_step(trainer, prepare(trainer, data, np.arange(20)), 1).grad_norm.item()
        norms[clip] = before, math.hypot(*(p.grad.norm().item() for p in trainer.model.parameters()))
    assert norms["0"] == pytest.approx((norms["0.01"][0],) * 2)
    assert norms["0.01"][1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(data, monkeypatch, value):
    trainer, loss_of = build(), step.label_smoothed_loss
    train_step(trainer, prepare(trainer, data, np.arange(20)), 1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    monkeypatch.setattr(step, "label_smoothed_loss", lambda *a: (loss_of(*a)[0] * value, loss_of(*a)[1]))
    stats = train_step(trainer, prepare(trainer, data, np.arange(20)), 2)
    assert stats.skipped.item() == 1
    assert not math.isfinite(stats.grad_norm.item())
    assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {1}


class Alone:
    """The first of two processes, whose gradients DDP would halve: the other one has nothing to add."""

    def __init__(self) -> None:
        self.rank, self.size, self.device, self.is_main = 0, 2, torch.device("cpu"), True


def test_of_two_processes_one_computes_its_share_and_counts_a_borrowed_micro_batch_for_nothing(data, monkeypatch):
    """DDP takes the mean of the gradients, so each process gives twice its part of the sum; see batching.share."""
    monkeypatch.setattr(step, "wrap_ddp", lambda model, world: model)
    monkeypatch.setattr(Trainer, "no_sync", lambda self: step.contextlib.nullcontext())
    changes = ("model.dropout=0", "optim.clip_norm=0", "runtime.device_tokens=5000")
    update = np.array([0, 1, 2])
    whole = build(*changes)
    train_step(whole, prepare(whole, data, update), 1)
    expected = [p.grad.clone() for p in whole.model.parameters()]
    tokens = int(data.tgt.lengths[update].sum())
    sums, losses = [torch.zeros_like(grad) for grad in expected], 0.0
    for rank in (0, 1):
        world = Alone()
        world.rank = rank
        trainer = build(*changes, world=world)
        stats = train_step(trainer, prepare(trainer, data, update), 1)
        losses += stats.loss.item()
        assert stats.tgt_tokens == tokens, "of the whole update, on every process"
        for total, p in zip(sums, trainer.model.parameters(), strict=True):
            total += p.grad / 2
    assert losses == pytest.approx(plain_losses(build(*changes), data, update)[0], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(sums, expected, strict=True))
    borrowed = Alone()
    borrowed.rank = 1
    trainer = build(*changes, world=borrowed)
    stats = train_step(trainer, prepare(trainer, data, update[:1]), 1)  # one micro-batch, which is the other's
    assert (stats.loss.item(), stats.nll.item()) == (0, 0)
    assert all(not p.grad.any() for p in trainer.model.parameters())


def test_gradients_are_exchanged_in_the_last_micro_batch_alone(data, monkeypatch):
    inside, seen, forward = [], [], step.TrainingModel.forward

    @step.contextlib.contextmanager
    def no_sync():
        inside.append(True)
        yield
        inside.pop()

    def looking(self, *ids):
        seen.append(bool(inside))
        return forward(self, *ids)

    monkeypatch.setattr(step, "wrap_ddp", lambda model, world: model)
    monkeypatch.setattr(step.TrainingModel, "no_sync", lambda self: no_sync(), raising=False)
    monkeypatch.setattr(step.TrainingModel, "forward", looking)
    trainer = build(world=Alone())
    parts = step.micro_batches(trainer, data, np.arange(40))
    train_step(trainer, prepare(trainer, data, np.arange(40)), 1)
    assert len(parts) % 2 == 0
    assert seen == [True] * (len(parts) // 2 - 1) + [False]


def test_several_processes_exchange_gradients_twice_before_the_first_step(data, monkeypatch):
    """DDP orders its buckets anew between the two, and sums of more than two numbers depend on their order."""
    passes, alone = [], []

    @step.contextlib.contextmanager
    def not_exchanged(trainer):
        alone.append(True)
        yield
        alone.clear()

    monkeypatch.setattr(step, "wrap_ddp", lambda model, world: model)
    monkeypatch.setattr(Trainer, "no_sync", not_exchanged)
    monkeypatch.setattr(memory, "_pass", lambda trainer, data, pairs: passes.append((len(pairs) > 1, not alone)))
    two = Alone()
    two.sum = list
    for world in (ALONE, two):
        probe_memory(build(world=world), data)
    one, exchanged, worst_case_batch = (False, False), (False, True), (True, False)
    assert passes == [worst_case_batch, one, exchanged, exchanged, worst_case_batch]


def test_dropout_draws_other_masks_in_each_micro_batch_step_and_seed(data, monkeypatch):
    seeds, forward = [], step.TrainingModel.forward

    def remembering(self, *ids):
        seeds.append(torch.initial_seed())
        return forward(self, *ids)

    monkeypatch.setattr(step.TrainingModel, "forward", remembering)
    for changes, number in (((), 1), ((), 2), (("train.seed=2",), 1)):
        trainer = build(*changes)
        assert len(step.micro_batches(trainer, data, np.arange(40))) > 3
        train_step(trainer, prepare(trainer, data, np.arange(40)), number)
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_mixed_seed_depends_on_each_number_and_their_order():
    seeds = {derive_seed(*numbers) for numbers in itertools.product((0, 1, 2), repeat=3)}
    assert len(seeds) == 27
    assert all(0 <= seed < 2**63 for seed in seeds)
    drawn = np.array([derive_seed(1, number) for number in range(2000)], dtype=np.float64) / 2**63
    assert abs(drawn.mean() - 0.5) < 0.03, "no bit is always the same"
    assert (drawn < 0.5).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("model.norm_order=pre", "model.norm_type=rms", "model.activation=swiglu", "model.position=rope"),
        ("model.position=learned", "model.attention_dropout=0.1", "model.kv_heads=1"),
        ("optim.clip_norm=0", "runtime.device_tokens=12"),
    ],
)
def test_a_step_reads_no_value_from_its_device(monkeypatch, changes):
    """Tensors of torch's "meta" device have no values: whoever asked for one, as `item` does, would get an error."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: step.contextlib.nullcontext())
    monkeypatch.setattr(import_module("torch.optim.adam"), "_device_dtype_check_for_fused", lambda *_, **__: None)
    rng = np.random.default_rng(0)
    data = of_lengths(*rng.integers(1, 30, (2, 60)).tolist())
    trainer = Trainer.build(settings(*changes), World(0, 1, torch.device("meta")), (340, 340))
    for number in (1, 2):
        update = prepare(trainer, data, np.arange(40))
        assert len(update.micro_batches) > 1
        stats = train_step(trainer, update, number)
    assert trainer.optimizer.state, "Adam has taken its steps"
    for value in (stats.loss, stats.nll, stats.grad_norm, stats.skipped):
        with pytest.raises(RuntimeError, match="meta"):
            value.item()


def test_an_update_is_prepared_alike_in_any_thread_with_all_that_messages_and_measurements_need(data):
    trainer, pairs = build(), np.arange(5, 45)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(prepare, trainer, data, pairs).result()
    parts = step.micro_batches(trainer, data, pairs)
    assert [part.number for part in found.micro_batches] == list(range(len(parts)))
    assert found.rows.tolist() == data.rows[pairs].tolist()
    for part, expected in zip(found.micro_batches, parts, strict=True):
        assert part.pairs.tolist() == expected.tolist()
        assert part.rows.tolist() == data.rows[expected].tolist()
        batch = collate(*data.take(expected))
        for name in ("src", "tgt_in", "tgt_out", "real"):
            assert torch.equal(getattr(part.batch, name), getattr(batch, name))


# ── the parts of a training ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_process_and_every_build_has_the_weights_of_the_seed():
    one, two, other = build(), build(), build("train.seed=2")
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, two.model.state_dict()[name])
    assert not torch.equal(one.model.embedding.weight, other.model.embedding.weight)


@pytest.mark.parametrize(("joint", "src"), [("true", None), ("false", 300)])
def test_the_source_has_its_own_embedding_where_the_vocabularies_are_two(joint, src):
    model = Trainer.build(settings(f"bpe.shared_vocab={joint}"), ALONE, (300, 340)).model
    assert model.embedding.num_embeddings == 340
    assert (model.src_embedding.num_embeddings if model.src_embedding else None) == src


@pytest.mark.parametrize(
    ("tokens", "size", "limit"), [("auto", 1, 188), ("auto", 2, 94), ("auto", 400, 1), (64, 2, 64)]
)
def test_auto_begins_with_what_one_process_has_of_an_update_and_a_quarter_for_padding(monkeypatch, tokens, size, limit):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(step, "wrap_ddp", lambda model, world: model)
    assert build(f"runtime.device_tokens={tokens}", world=World(0, size, torch.device("cpu"))).device_tokens == limit


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", None), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_products_are_made_in_the_precision_that_was_set(precision, dtype):
    trainer = build(f"train.precision={precision}")
    assert trainer.scaler.is_enabled() is (precision == "float16")
    with trainer.precision():
        assert torch.is_autocast_enabled("cpu") is (dtype is not None)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), MemoryError(), torch.OutOfMemoryError("x")],
)
def test_running_out_of_memory_is_told_with_the_size_of_what_was_computed(error):
    data = of_lengths([3, 9, 4], [5, 2, 1])
    with pytest.raises(OutOfMemory) as told, oom_context(build(), data, np.array([2, 0, 1])):
        raise error
    assert told.value.__cause__ is error
    for words in ("process 0 of 1", "of 3 pairs, 27 padded tokens a side", "has 9 + 2 tokens (line 11 of", "now 40)"):
        assert words in str(told.value)
    with pytest.raises(RuntimeError, match="shapes"), oom_context(build(), data, np.array([0])):
        raise RuntimeError("shapes do not fit")


def plain_largest(trainer: Trainer, src: np.ndarray, tgt: np.ndarray) -> float:
    """The largest memory that pairs take which are alike: those up to a length, the longest of them."""
    limit, best = int(min(trainer.device_tokens, 1.25 * trainer.config.train.batch_tokens)), 0.0
    longer = np.maximum(src, tgt)
    for length in set(longer):
        alike = sorted(i for i in range(len(src)) if longer[i] <= length)
        alike = sorted(alike, key=lambda i: longer[i])[-max(1, limit // length) :]
        best = max(best, len(alike) * sum(n * (1 + n / 16) for n in (src[alike].max(), tgt[alike].max())))
    return best


@pytest.mark.parametrize(("tokens", "update"), [(40, 150), (150, 40), (500, 10**6), (5, 150)])
def test_the_largest_micro_batch_takes_the_most_memory_of_all_that_are_alike(tokens, update):
    trainer = build(f"runtime.device_tokens={tokens}", f"train.batch_tokens={update}")
    for seed in range(30):
        rng = np.random.default_rng(seed)
        src, tgt = rng.integers(1, 30, (2, 60))
        data = of_lengths(src.tolist(), tgt.tolist())

        def size(pairs, src=src, tgt=tgt):
            return len(pairs) * sum(n * (1 + n / 16) for n in (src[pairs].max(), tgt[pairs].max()))

        found = worst_case_batch(trainer, data)
        assert size(found) == pytest.approx(plain_largest(trainer, src, tgt))
        assert len(found) == 1 or batching.padded_size(src[found], tgt[found]) <= min(tokens, 1.25 * update)


def test_an_update_tells_where_it_is_and_with_which_lines(data):
    told = []

    class Listening(step.NoHeartbeat):
        def __call__(self, doing, rows=(), step=None):
            told.append((doing, list(rows), step))

    trainer = Trainer.build(settings("runtime.device_tokens=40"), ALONE, (340, 340), Listening())
    parts = step.micro_batches(trainer, data, np.arange(20))
    train_step(trainer, prepare(trainer, data, np.arange(20)), 7)
    assert told == [
        (f"{name} pass of micro-batch {turn} of {len(parts)}", data.rows[pairs].tolist(), 7)
        for turn, pairs in enumerate(parts, 1)
        for name in ("forward", "backward")
    ]


@pytest.mark.parametrize(("fits", "found"), [(10**6, 188), (187, 141), (141, 141), (140, 105), (78, 78), (77, 58)])
def test_auto_takes_three_quarters_until_it_fits_and_says_so(data, monkeypatch, caplog, fits, found):
    def passing(trainer, data, pairs):
        if trainer.device_tokens > fits:
            raise MemoryError

    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(memory, "_pass", passing)
    with caplog.at_level("INFO"):
        assert probe_memory(build("runtime.device_tokens=auto"), data).device_tokens == found
    assert f"runtime.device_tokens is {found}, the largest that fits" in caplog.text


@pytest.mark.parametrize(("tokens", "found"), [("auto", 105), ("112", 112)])
def test_auto_leaves_a_tenth_of_a_gpu_to_spare_and_a_limit_that_was_set_does_not(data, monkeypatch, tokens, found):
    as_on_a_gpu(monkeypatch)
    now, resets = [], []
    gpu = SimpleNamespace(rank=0, size=1, device=torch.device("cuda"), is_main=True, sum=list)
    trainer = replace(build(f"runtime.device_tokens={tokens}"), world=gpu)
    # As much of 100 is reserved as in a GPU where 105 tokens take 90 of it.
    reserved = {188: 99, 141: 92, 112: 91, 105: 90, 78: 50}
    monkeypatch.setattr(memory, "_pass", lambda trainer, data, pairs: now.append(reserved[trainer.device_tokens]))
    for name, answer in (
        ("get_device_properties", lambda device: SimpleNamespace(total_memory=100)),
        ("max_memory_reserved", lambda device: now[-1]),
        ("reset_peak_memory_stats", lambda device: resets.append(device)),
        ("empty_cache", lambda: resets.append("cache")),
    ):
        monkeypatch.setattr(step.torch.cuda, name, answer)
    assert probe_memory(trainer, data).device_tokens == found
    assert resets == [gpu.device, "cache"] * len(now), "nothing of one try is left for the next"


@pytest.mark.parametrize(("src", "tgt"), [([3, 84, 4], [5, 2, 1]), ([5, 2, 1], [84, 3, 4])])
def test_auto_gives_up_where_the_longest_pair_would_be_cut(monkeypatch, src, tgt):
    as_on_a_gpu(monkeypatch)
    data = of_lengths(src, tgt)
    seen = []

    def failing(trainer, data, pairs):
        seen.append(trainer.device_tokens)
        raise MemoryError

    monkeypatch.setattr(memory, "_pass", failing)
    with pytest.raises(OutOfMemory):
        probe_memory(build("runtime.device_tokens=auto"), data)
    assert seen == [188, 141, 105]
    seen.clear()
    with pytest.raises(OutOfMemory):
        probe_memory(build("runtime.device_tokens=100"), data)
    assert seen == [100], "a limit that was set stays"


def test_a_rehearsal_leaves_neither_gradients_nor_other_weights_nor_other_random_numbers(data):
    trainer = build()
    before, _ = [p.detach().clone() for p in trainer.model.parameters()], torch.manual_seed(7)
    expected, _ = torch.rand(3), torch.manual_seed(7)
    probe_memory(trainer, data)
    assert torch.equal(torch.rand(3), expected)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))


def test_the_rehearsal_holds_adams_moments_that_are_still_to_come(data, monkeypatch):
    trainer, sizes = build(), []
    empty_like = torch.empty_like
    monkeypatch.setattr(step.torch, "empty_like", lambda p: sizes.append(p.numel()) or empty_like(p))
    monkeypatch.setattr(memory, "_pass", lambda *_: None)
    probe_memory(trainer, data)
    assert sum(sizes) == 2 * sum(p.numel() for p in trainer.model.parameters())
    monkeypatch.undo()
    train_step(trainer, prepare(trainer, data, np.arange(9)), 1)
    monkeypatch.setattr(step.torch, "empty_like", lambda p: pytest.fail("the moments exist by now"))
    monkeypatch.setattr(memory, "_pass", lambda *_: None)
    probe_memory(trainer, data)


# ── the dev set ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokens", [12, 40, 5000])
def test_the_loss_of_a_set_is_the_mean_over_its_target_tokens_without_dropout(data, tokens):
    trainer = build(f"runtime.device_tokens={tokens}", "model.dropout=0.5")
    trainer.model.train()
    found = dev_loss(trainer, data)
    assert trainer.model.training
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.model.eval()
    expected = plain_losses(trainer, data, np.arange(len(data)))
    assert found == pytest.approx([value / data.tgt.lengths.sum() for value in expected], rel=1e-5)
    assert 0 < math.exp(found[1]) < 2 * 340


# ── compiled layers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def compiled(monkeypatch):
    """Builds trainers whose layers are traced by torch.compile, but run without generated code."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_module(self, backend="aot_eager", **kw))
    torch._dynamo.reset()
    yield lambda *changes: build("runtime.compile=true", "model.dropout=0", "model.layers=2", *changes)
    torch._dynamo.reset()


@pytest.mark.slow
def test_gradients_of_a_compiled_model_become_ready_layer_by_layer(compiled, data):
    model = compiled().model
    layers = [*model.encoder, *model.decoder_layers]
    events: list[int | None] = []  # the number of a layer whose gradient is ready, None for a read of what was kept
    for number, layer in enumerate(layers):
        for weight in layer.parameters():
            weight.register_post_accumulate_grad_hook(lambda _, number=number: events.append(number))

    def read(kept):
        events.append(None)
        return kept

    batch = collate(*data.take(np.arange(4)))
    model(batch.src, batch.tgt_in)  # compiles
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, read):
        loss = model(batch.src, batch.tgt_in).sum()
    loss.backward()
    # A layer's backward pass begins with reading what its forward pass kept: the one before has all gradients by then.
    order = [number for number, _ in itertools.groupby(n for n in events if n is not None)]
    assert order == list(reversed(range(len(layers))))
    for number in range(1, len(layers)):
        last = len(events) - 1 - events[::-1].index(number)
        assert None in events[last : events.index(number - 1)], f"layer {number} waits for layer {number - 1}"


@pytest.mark.slow
def test_compiled_layers_are_not_compiled_again_for_each_shape(compiled, data):
    model = compiled().model
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    for count in range(2, 30):
        batch = collate(*data.take(np.arange(count, 2 * count)))
        model(batch.src, batch.tgt_in).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[-1] == graphs[4], f"graphs after each batch: {graphs}"
    assert not counters["graph_break"]
