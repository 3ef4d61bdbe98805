"""Values that several ranks should have alike. Skipped where torch is not installed, or was built without distributed."""

import pytest

from support_python import ckptdelta, needs_package, needs_torch, torch

HAS_GLOO = torch is not None and torch.distributed.is_available() and torch.distributed.is_gloo_available()
pytestmark = [needs_package, needs_torch,
              pytest.mark.skipif(torch is not None and not HAS_GLOO, reason="this torch was built without gloo")]
if HAS_GLOO and ckptdelta is not None:
    import support_replicas
    from ckptdelta._torch import sum_of_words


def test_the_rank_whose_memory_has_changed_says_so(tmp_path):
    support_replicas.launch("three", 3, tmp_path)


def test_of_two_ranks_nothing_tells_which_is_right(tmp_path):
    support_replicas.launch("two", 2, tmp_path)


def layouts():
    base = torch.arange(997, dtype=torch.float64)
    yield "whole", base
    for name in ("float32", "bfloat16", "int8", "bool", "complex64"):
        yield name, base.to(getattr(torch, name))
    yield "channels last", torch.rand(2, 3, 5, 7).to(memory_format=torch.channels_last)
    yield "not at a word", torch.arange(1000, dtype=torch.int16)[3:800]
    yield "no dimensions", torch.tensor(3.5)


@pytest.mark.parametrize("name, tensor", list(layouts()) if torch is not None else [])
def test_each_bit_counts_in_a_sum(name, tensor):
    size = tensor.numel() * tensor.element_size()
    whole = int(sum_of_words(tensor, 0, size))
    parts = [(at, min(at + 64, size)) for at in range(0, size, 64)]
    assert (sum(int(sum_of_words(tensor, *part)) for part in parts) - whole) % 2**64 == 0
    other = tensor.clone()
    assert int(sum_of_words(other, 0, size)) == whole
    data = torch.empty(0, dtype=torch.uint8).set_(other.untyped_storage())
    for at in {0, 1, size // 2, size - 1}:
        for bit in (0, 7):
            data[at] ^= 1 << bit
            assert int(sum_of_words(other, 0, size)) != whole
            changed = [part for part in parts if int(sum_of_words(other, *part)) != int(sum_of_words(tensor, *part))]
            assert changed == [(at // 64 * 64, min(at // 64 * 64 + 64, size))]
            data[at] ^= 1 << bit


def test_elements_that_are_not_in_a_row():
    tensor = torch.rand(10, 10)
    assert int(sum_of_words(tensor[:, ::2], 0, 200)) == int(sum_of_words(tensor[:, ::2].contiguous(), 0, 200))


def test_signs_that_change_do_not_cancel():
    tensor = torch.rand(100)
    other = tensor.clone()
    other[1], other[7] = -other[1], -other[7]
    assert int(sum_of_words(tensor, 0, 400)) != int(sum_of_words(other, 0, 400))
