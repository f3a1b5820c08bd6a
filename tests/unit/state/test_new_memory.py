"""New tensors on huge pages stay what torch made, and are asked for once each; what is short or refused is left as it is."""

from __future__ import annotations

import mmap

import pytest
import torch

from tierstore.state import pages
from tierstore.state.pages import HUGE_NBYTES, on_huge_pages


class Advised:
    """The advice that was given, as address, length and advice; `answer` is what the kernel says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: int = 0) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.answer = answer
        monkeypatch.setattr(pages, "_madvise", lambda: self)

    def __call__(self, address: int, nbytes: int, advice: int) -> int:
        self.calls.append((address, nbytes, advice))
        return self.answer


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the kernel has no huge pages to ask for")
@pytest.mark.parametrize("answer", [0, -1])
def test_whole_pages_around_a_long_tensor_are_asked_for_once_whatever_the_answer(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    advised = Advised(monkeypatch, answer)
    tensor = torch.arange(HUGE_NBYTES + 5, dtype=torch.uint8)[5:]
    before = tensor.clone()
    assert on_huge_pages(tensor) is tensor
    ((address, nbytes, advice),) = advised.calls
    assert advice == mmap.MADV_HUGEPAGE
    assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
    assert address <= tensor.data_ptr() < address + mmap.PAGESIZE
    assert tensor.data_ptr() + tensor.nbytes <= address + nbytes < tensor.data_ptr() + tensor.nbytes + mmap.PAGESIZE
    assert torch.equal(tensor, before)


def test_a_short_tensor_and_an_empty_one_cost_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    advised = Advised(monkeypatch)
    for nbytes in (0, 1, HUGE_NBYTES - 1):
        on_huge_pages(torch.zeros(nbytes, dtype=torch.uint8))
    assert advised.calls == []


def test_without_the_system_call_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    tensor = torch.ones(HUGE_NBYTES, dtype=torch.uint8)
    assert on_huge_pages(tensor) is tensor
    assert int(tensor.sum()) == HUGE_NBYTES


def test_the_kernel_takes_the_advice_or_refuses_it_and_the_memory_can_be_written() -> None:
    tensor = on_huge_pages(torch.empty(4 << 20, dtype=torch.uint8))
    tensor.fill_(7)
    assert int(tensor[-1]) == 7
