"""Models with a sequence split over processes do what one process does: loss, gradients, cache, refusals."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from conftest import Cases, python_of, toy_model
from judge import error
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as cp
from transformers import BertConfig, BertModel

from cosformer.hf import (
    CosformerConfig,
    CosformerEncoderConfig,
    CosformerForCausalLM,
    CosformerForConditionalGeneration,
    CosformerForMaskedLM,
    CosformerForSequenceClassification,
    CosformerForTokenClassification,
    CosformerModel,
    prefill,
    sequence_parallel,
)
from cosformer.mixers import softmax

CASES = Cases()
SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "dropout": 0.0}
LENGTHS = {2: [17, 33], 4: [19, 1, 2, 28]}
DOCUMENTS = [*range(13), *range(7), *range(25), *range(5)]


def decoder(mixer="cosformer", **more):
    torch.manual_seed(1)
    config = CosformerConfig(**SMALL, mixer=mixer, tie_word_embeddings=False, **more)
    return awake(CosformerForCausalLM(config))


def encoder(kind, mixer="cosformer", **more):
    torch.manual_seed(1)
    return awake(kind(CosformerEncoderConfig(**SMALL, mixer=mixer, num_labels=3, **more)))


def awake(model):
    """In float64, with gates and convolutions that do something."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.double()


def compare(group, model, batch, *, shared=()):
    """Compares the loss and gradients of a batch (B, N) in one process with those of the group's processes,
    averaged; the loss is float32."""
    rank, W = dist.get_rank(group), dist.get_world_size(group)
    lengths = LENGTHS[W]
    if "shift_labels" in batch:
        batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    alone = {name: t for name, t in batch.items() if name != "shift_labels"}
    model.train()
    model.zero_grad()
    loss = model(**alone).loss
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    part = {name: t if name in shared else t.split(lengths, 1)[rank] for name, t in batch.items()}
    with sequence_parallel(model, group):
        mine = model(**part).loss
        mine.backward()
    mean = mine.detach().clone()
    dist.all_reduce(mean, group=group)
    assert abs(mean.item() / W - loss.item()) < 2e-6, (mean.item() / W, loss.item())
    largest = max(g.abs().max() for g in wanted.values())
    for name, p in model.named_parameters():
        total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(total, group=group)
        assert error(total / W, wanted[name], largest) < 1e-5, name


def text(packed=False, masked=False):
    torch.manual_seed(2)
    ids = torch.randint(3, 40, (2, 50))
    labels = ids.clone()
    labels[:, ::7] = -100
    batch = {"input_ids": ids, "labels": labels, "shift_labels": labels}
    if packed:
        batch["position_ids"] = torch.tensor([DOCUMENTS, DOCUMENTS[::-1]])
        batch["position_ids"][1] = torch.arange(50)
    if masked:
        at = torch.arange(50)
        batch["attention_mask"] = torch.stack([at >= 20, at < 31]).long()  # padded left, and right
    return batch


MIXERS = (
    "cosformer",
    "cosformer-paper",
    "cosformer-ladder",
    "relu",
    "softmax+rope",
    "cosformer, softmax+rope",
)


@CASES.add(*MIXERS)
def decoders(group, mixer):
    compare(group, decoder(mixer), text())
    compare(group, decoder(mixer), text(masked=True))
    compare(group, decoder(mixer), text(packed=True))


@CASES.add("softmax+rope")
def softmax_of_some_queries_at_a_time(group, mixer):
    with patch.object(softmax, "PAIRS", 3 * 50):
        decoders(group, mixer)
        encoders(group, "softmax")


@CASES.add()
def decoders_with_all_the_rest(group, _):
    compare(group, decoder(output_gate=True, positions="learned"), text())
    model = decoder(loss="one-vs-each", loss_samples=100)
    compare(group, model, text(packed=True))
    model = decoder()
    model.gradient_checkpointing_enable()
    compare(group, model, text(packed=True))


@CASES.add("cosformer", "cosformer-paper", "softmax")
def encoders(group, mixer):
    for kind in (CosformerForMaskedLM, CosformerForTokenClassification):
        batch = text(masked=True)
        batch.pop("shift_labels")
        if kind is CosformerForTokenClassification:
            batch["labels"] = batch["labels"].clamp(max=2)
        compare(group, encoder(kind, mixer), batch)
    batch = text(packed=True)
    batch.pop("shift_labels")
    compare(group, encoder(CosformerForMaskedLM, mixer), batch)


@CASES.add("mean", "max", "mean-max", "attention", "normed-mean")
def poolings(group, pooling):
    batch = text(masked=True)
    batch.pop("shift_labels")
    batch["labels"] = torch.tensor([0, 2])
    model = encoder(CosformerForSequenceClassification, pooling=pooling)
    everybody = dist.get_world_size(group) == dist.get_world_size()
    if everybody or pooling != "normed-mean":  # it normalises over all processes
        compare(group, model, batch, shared=("labels",))


@CASES.add("cosformer", "cosformer-paper", "cosformer, softmax+rope")
def a_prompt_read_together_goes_on_in_each(group, mixer):
    model = decoder(mixer).eval()
    for length in (41, 3):
        ids = torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(length))
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        alone = model.generate(ids, **options)
        cache = prefill(model, ids, group)
        assert cache.get_seq_length() == length - 1
        together = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
        assert torch.equal(together, alone)


@CASES.add()
def the_page_says_it_right(group, _):
    page: dict = {}
    exec("\n".join(python_of(Path(__file__).parents[1] / "docs" / "parallel.md")), page)
    model, batch = decoder(), text()
    ids, labels = batch["input_ids"], batch["labels"]
    model(ids, labels=labels).loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    page["loss_of"](model, ids, torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:], group).backward()
    for p, w in zip(model.parameters(), wanted, strict=True):
        dist.all_reduce(p.grad, group=group)
        assert error(p.grad / dist.get_world_size(group), w, max(g.abs().max() for g in wanted)) < 1e-5
    assert torch.equal(page["answer"](model.eval(), ids, group), model.generate(ids))


@CASES.add()
def refusals(group, _):
    model, W = decoder(), dist.get_world_size(group)
    ids = torch.randint(3, 40, (1, 8))
    with sequence_parallel(model, group):
        with pytest.raises(ValueError, match="shift the labels of the whole"):
            model(ids, labels=ids)
        rank, at = dist.get_rank(group), torch.arange(8)[None]
        for wrong in (
            torch.tensor([[0, 1, 6, 7, 2, 3, 4, 5]]),
            8 * (W - 1 - rank) + at,  # parts in another order
            torch.where(at < 4, at, at + (rank == W - 1)) + 8 * rank,  # only the last process's are wrong
        ):
            with pytest.raises(ValueError, match="must count each sequence from 0, in order, .* and end at"):
                model(ids, position_ids=wrong)
        model(ids, position_ids=8 * rank + at)
        model(ids, position_ids=at)
        with pytest.raises(ValueError, match="each process needs a token"):
            model(ids[:, : dist.get_rank(group)])
    assert model.model.sequence_group is None
    hybrid = decoder("softmax+rope")
    with (
        sequence_parallel(hybrid, group, limit=1000),
        pytest.raises(ValueError, match=f"of all {8 * W} tokens"),
    ):
        hybrid(ids)
    for mixer in ("bigbird", "performer"):
        other = encoder(CosformerForMaskedLM, mixer)
        with sequence_parallel(other, group), pytest.raises(ValueError, match="must all be in one process"):
            other(ids)
    with (
        pytest.raises(TypeError, match="cannot share a sequence"),
        sequence_parallel(torch.nn.Linear(2, 2), group),
    ):
        pass
    other = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to a process outside
    for use in (lambda: prefill(model, ids, other), lambda: sequence_parallel(model, other).__enter__()):
        with pytest.raises(ValueError, match="is not one of it"):
            use()
    with sequence_parallel(model):  # no group means all, as in torch
        assert model.model.sequence_group is dist.group.WORLD


def test_one_process_has_nobody_to_share_with():
    """dist.group.WORLD is None then, and a model told None would take a part for the whole."""
    for use in (lambda: prefill(decoder(), None), lambda: sequence_parallel(decoder()).__enter__()):
        with pytest.raises(ValueError, match="call dist.init_process_group first"):
            use()


def all_kinds():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    bert = BertConfig(vocab_size=40, **sizes, attn_implementation="cosformer", cosformer={"horizon": 96})
    return {
        "decoder": decoder(),
        "softmax": decoder("softmax+rope"),
        "encoder": encoder(CosformerForMaskedLM),
        "seq2seq": toy_model(CosformerForConditionalGeneration),
        "interface": BertModel._from_config(bert),
    }


@CASES.add()
def torch_context_parallelism_is_refused(group, _):
    mesh = DeviceMesh.from_group(group, "cpu")
    for model in all_kinds().values():
        ids = torch.randint(3, 40, (1, 16))
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
            assert ids.shape[1] == 16 // dist.get_world_size(group)
            with pytest.raises(
                ValueError, match="torch's context_parallel is active, .*use cosformer.hf.sequence_parallel"
            ):
                model(ids)
        model(ids)


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_accelerate_parallelism_is_refused(monkeypatch, size):
    """Also in a user's own loop or Trainer: the models look at what accelerate was told."""
    ids = torch.randint(3, 40, (1, 16))
    for kind, model in all_kinds().items():
        told = {"parallelism_config": ParallelismConfig(dp_shard_size=2, **{size: 4})}
        monkeypatch.setattr(AcceleratorState, "_shared_state", told)
        with pytest.raises(ValueError, match=f"ParallelismConfig has {size}=4, .* --sequence-parallel 4"):
            model(ids)
        told["parallelism_config"] = ParallelismConfig(dp_shard_size=2)
        model(ids)
        assert model.config._attn_implementation != "sdpa", kind  # what transformers' Trainer asks for


def test_a_compiled_model_refuses_what_it_refuses_otherwise(monkeypatch):
    """Also what is set after it was compiled; in a graph every refusal is a RuntimeError."""
    model = CosformerModel(CosformerConfig(**SMALL | {"num_hidden_layers": 1}))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids, given = torch.randint(3, 40, (1, 8)), {"attention_mask": torch.ones(1, 8, dtype=torch.long)}
    plain = given | {"position_ids": torch.arange(8)[None]}
    compiled(ids, **plain)
    with pytest.raises(RuntimeError, match="position_ids must count each sequence from 0"):
        compiled(ids, **given, position_ids=torch.tensor([[0, 1, 6, 7, 2, 3, 4, 5]]))
    cp._enable_context_parallel_dispatcher_impl(2, None)
    try:
        with pytest.raises(RuntimeError, match="torch's context_parallel is active"):
            compiled(ids, **plain)
    finally:
        cp._disable_context_parallel_dispatcher_impl()
    told = {"parallelism_config": ParallelismConfig(dp_shard_size=2, cp_size=4)}
    monkeypatch.setattr(AcceleratorState, "_shared_state", told)
    with pytest.raises(RuntimeError, match="ParallelismConfig has cp_size=4"):
        compiled(ids, **plain)
    told.clear()
    compiled(ids, **plain)


@pytest.mark.parametrize("places", [[0, 1, 6, 7, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13, 14, 15]])
def test_permuted_and_cut_positions_are_refused_beside_a_mask(places):
    ids, mask = torch.randint(3, 40, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    for model in (decoder(), encoder(CosformerForMaskedLM)):
        with pytest.raises(ValueError, match="position_ids must count each sequence from 0"):
            model(ids, attention_mask=mask, position_ids=torch.tensor([places]))
        model(ids, attention_mask=mask, position_ids=torch.arange(8)[None])
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def said(request, tmp_path_factory):
    return CASES.run(__file__, tmp_path_factory.mktemp("models"), world=request.param), request.param


@pytest.mark.parametrize("name", CASES.names)
def test_models_of_processes_do_what_one_does(said, name):
    folder, world = said
    CASES.check(folder, name, size=world, world=world)


if __name__ == "__main__":
    CASES.work()
