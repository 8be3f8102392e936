"""Every sequence exactly once: on any number of ranks, in any order, in any batch size."""

import itertools
from collections.abc import Iterable

import lightning
import pytest
import torch

from lightning_hmm.data import GlobalBatchSampler, SequenceDataset, loader
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

NUM = 17


@pytest.fixture
def sequences() -> Sequences:
    """Sequence n is n times the symbol n, so an empty one is among them."""
    return Sequences.from_list([[n] * n for n in range(NUM)])


def numbers(batch: Sequences) -> list[int]:
    """Which of the sequences above are in a batch."""
    return batch.lengths.tolist()


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def global_batches(
    sequences: Sequences, world_size: int, batch_size: int | None, epoch: int = 0, **options: object
) -> list[list[int]]:
    """The batches of all ranks together, interleaved as they were dealt out."""
    ranks = []
    for rank in range(world_size):
        batches = loader(sequences, batch_size, rank=rank, world_size=world_size, **options)
        batches.sampler.set_epoch(epoch)
        ranks.append([numbers(batch) for batch in batches])
        assert len(ranks[-1]) == len(batches)
    assert len({len(batches) for batches in ranks}) == 1
    return [
        [n for deal in itertools.zip_longest(*parts) for n in deal if n is not None]
        for parts in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 16, 17, 100, None])
def test_every_sequence_once_and_the_same_global_batches_on_any_number_of_ranks(sequences, batch_size, shuffle):
    alone = global_batches(sequences, 1, batch_size, shuffle=shuffle)
    assert sorted(flat(alone)) == list(range(NUM))
    assert [len(batch) for batch in alone[:-1]] == [batch_size] * (len(alone) - 1)
    for world_size in (2, 3):
        assert global_batches(sequences, world_size, batch_size, shuffle=shuffle) == alone


def test_order_is_kept_without_shuffling(sequences):
    assert flat(global_batches(sequences, 1, 5, epoch=3)) == list(range(NUM))


def test_shuffling_follows_seed_and_epoch(sequences):
    def order(seed: int, epoch: int) -> list[int]:
        return flat(global_batches(sequences, 1, 5, epoch, shuffle=True, seed=seed))

    assert order(0, 0) == order(0, 0)
    assert order(0, 4) == order(0, 4)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    "values",
    [torch.arange(4), torch.ones(4, 3), torch.ones(4, 3, dtype=torch.float64)],
    ids=["symbols", "float32", "float64"],
)
@pytest.mark.parametrize("indices", [None, torch.tensor([1, 0])], ids=["all", "some"])
def test_a_rank_without_sequences_gets_an_empty_batch_of_the_right_kind(values, indices):
    two = Sequences.from_lengths(values, [3, 1], weights=[0.5, 2.0])
    (batch,) = loader(two, indices=indices, rank=2, world_size=3)
    assert len(batch) == 0
    assert batch.num_steps == 0
    assert batch.values.dtype == values.dtype
    assert batch.values.shape[1:] == values.shape[1:]
    assert batch.weights is not None
    assert batch.weights.shape == (0,)


def test_no_sequences_make_no_batches():
    assert list(loader(Sequences.from_list([]))) == []


def test_the_whole_is_not_copied(sequences):
    (batch,) = loader(sequences)
    assert batch is sequences
    first, _ = loader(sequences, 16)
    assert first.values.data_ptr() == sequences.values.data_ptr()


def test_indices_choose_and_order(sequences):
    chosen = torch.tensor([7, 3, 11, 0])
    assert [numbers(batch) for batch in loader(sequences, 3, indices=chosen)] == [[7, 3, 11], [0]]


def test_weights_go_with_their_sequences():
    weighted = Sequences.from_lengths(torch.arange(3), [1, 1, 1], weights=[1.0, 2.0, 3.0])
    (batch,) = loader(weighted, rank=0, world_size=2)
    assert batch.values.tolist() == [0, 2]
    assert batch.weights.tolist() == [1.0, 3.0]


def test_workers_give_the_same_batches_epoch_after_epoch(sequences):
    batches = loader(sequences, 4, shuffle=True, num_workers=1)
    here = loader(sequences, 4, shuffle=True)
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        here.sampler.set_epoch(epoch)
        assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in here]
    batches._iterator._shutdown_workers()


def test_the_global_random_state_is_left_alone(sequences):
    before = torch.get_rng_state()
    list(loader(sequences, 4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_lightning_leaves_the_sampler_alone(sequences):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=True,
    )
    batches = loader(sequences, 4, rank=0, world_size=2)
    plain = torch.utils.data.DataLoader(batches.dataset, batch_size=None)
    assert trainer._data_connector._requires_distributed_sampler(plain)  # what would happen to another
    assert not trainer._data_connector._requires_distributed_sampler(batches)


def test_generators_of_different_words_differ():
    draws = [
        torch.rand(1, generator=generator(*words)).item()
        for words in [(0,), (1,), (0, "a"), (0, "b"), (0, "a", 1), (0, "a", 2)]
    ]
    assert len(set(draws)) == len(draws)
    assert torch.rand(1, generator=generator(0, "a")).item() == draws[2]


def test_errors(sequences):
    with pytest.raises(ValueError, match=r"`batch_size` must be positive, .* but is 0 instead"):
        loader(sequences, 0)
    with pytest.raises(ValueError, match="rank"):
        GlobalBatchSampler(SequenceDataset(sequences), rank=2, world_size=2)
    with pytest.raises(TypeError, match=r"overfit_batches.*limit_train_batches"):
        SequenceDataset(sequences)[3]
